// Pages of keys and values to other places, in one launch for all layers of a cache: to other pages of the same cache (copy on write,
// compaction), or out of it to where the tokens of a sequence lie one behind the other. Or other arrays of so many axes into another order.
//
// The grid is one row of blocks: those for the keys of a page, one page after the other, layer after layer; then likewise those for values.
// A thread moves a piece of a row: 16 bytes, or one number where strides or addresses forbid that.
#include "include/types.cuh"

struct PageStrides {  // of (layers, pages, page_size, heads, columns), in bytes
    i64 layer, page, token, head, column;
};

struct PageCopyParams {
    const void *k_from, *v_from;
    void *k_to, *v_to;
    const i32* pages_from;  // (count), or null: the first, the second, ...
    const i32* pages_to;    // likewise
    PageStrides k_from_stride, v_from_stride, k_to_stride, v_to_stride;
    i64 tokens;  // of all pages together; those behind stay where they are
    i32 layers, count, page_size, heads;
    i32 k_pieces, v_pieces;  // of a row
    i32 k_bytes, v_bytes;    // of a piece
    i32 k_blocks, v_blocks;  // of a page
};

constexpr int PAGE_COPY_THREADS = 128;  // of a block

template <class T> __device__ __forceinline__ void move_piece(const void* from, void* to) {
    *static_cast<T*>(to) = *static_cast<const T*>(from);
}

// Piece `piece` of page `number` of a layer, if there is one.
__device__ __forceinline__ void copy_piece(
    const PageCopyParams& p, const void* from, const PageStrides& f, void* to, const PageStrides& t, i64 layer, int number, u32 piece,
    u32 pieces, int bytes) {
    const u32 row = piece / pieces, token = row / u32(p.heads);
    const i64 column = piece - row * pieces, head = row - token * p.heads;
    if (token >= u32(p.page_size) || i64(number) * p.page_size + token >= p.tokens) return;
    const i64 page_from = p.pages_from ? p.pages_from[number] : number, page_to = p.pages_to ? p.pages_to[number] : number;
    const char* source =
        static_cast<const char*>(from) + layer * f.layer + page_from * f.page + token * f.token + head * f.head + column * f.column;
    char* target = static_cast<char*>(to) + layer * t.layer + page_to * t.page + token * t.token + head * t.head + column * t.column;
    if (bytes == 16) move_piece<uint4>(source, target);
    else if (bytes == 8) move_piece<u64>(source, target);
    else if (bytes == 4) move_piece<u32>(source, target);
    else if (bytes == 2) move_piece<u16>(source, target);
    else move_piece<u8>(source, target);
}

__device__ __forceinline__ void page_copy(const PageCopyParams& p) {
    const i64 pages = i64(p.layers) * p.count, block = blockIdx.x, values = block - pages * p.k_blocks;
    const bool is_key = values < 0;
    const i64 at = is_key ? block : values;
    const int blocks = is_key ? p.k_blocks : p.v_blocks;
    const i64 page = at / blocks;  // among those of all layers
    const u32 piece = u32(at - page * blocks) * PAGE_COPY_THREADS + threadIdx.x;
    const i64 layer = page / p.count;
    const int number = int(page - layer * p.count);
    if (is_key) copy_piece(p, p.k_from, p.k_from_stride, p.k_to, p.k_to_stride, layer, number, piece, p.k_pieces, p.k_bytes);
    else copy_piece(p, p.v_from, p.v_from_stride, p.v_to, p.v_to_stride, layer, number, piece, p.v_pieces, p.v_bytes);
}
