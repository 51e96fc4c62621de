// Which rows, value columns and keys a block of prefill_fp has, and where its results go.
#include "include/fp_rows.cuh"
#include "include/mask.cuh"

// Rows of results, and how they are written.
template <class Type> struct OutRows {
    Type* first_gmem;  // row 0 of the block's sequence, the block's first column
    i64 row_stride, column_stride;
    bool vector;  // 16 bytes at a time

    __device__ __forceinline__ Type* at(int row) const { return first_gmem + row * row_stride; }
};

// It is worked out anew wherever it is needed: registers are scarce in the main loop.
template <class C, bool PARTS = C::PARTS> struct FpWork : WorkItem {
    int first_column;
    Sequence seq;

    __device__ __forceinline__ FpWork(const PrefillParams& p, u32 block)
        : WorkItem(work_item(p, block / C::SLICES)), first_column(block % C::SLICES * C::DV), seq(sequence(p, batch)) {}

    __device__ __forceinline__ int first_row() const { return m_tile * C::M; }
    __device__ __forceinline__ int position() const { return first_row() + seq.position; }  // of the first row

    // Keys that some row of the block sees.
    __device__ __forceinline__ KeyRange keys(const PrefillParams& p) const {
        const int rows = min(C::M, seq.q_length - first_row());  // that exist
        return Visibility<C::MASK>(p, seq).of_any(position(), position() + rows - 1);
    }

    // Those of them that a row sees.
    __device__ __forceinline__ KeyRange keys(const PrefillParams& p, int row) const {
        return Visibility<C::MASK>(p, seq).of_all(row + seq.position, row + seq.position);
    }

    __device__ __forceinline__ int sink() const { return head; }  // whose sink the rows take, see RowEnd

    __device__ __forceinline__ OutRows<typename Stored<typename C::Out>::Type> out(const PrefillParams& p) const {
        using Type = typename Stored<typename C::Out>::Type;
        Type* first = row_gmem<Type>(p.out, p.out_stride, batch, seq.q_begin, head) + first_column * p.out_stride.column;
        return {first, p.out_stride.row, p.out_stride.column, p.out_vector != 0};
    }

    __device__ __forceinline__ void put_statistics(const PrefillParams& p, int row, const RowEnd& end) const {
        using T = typename C::T;
        if (p.lse) *row_gmem<T>(p.lse, p.lse_stride, batch, seq.q_begin + row, head) = T(end.lse);
    }
};

// Of a part of a row, whose weights are relative to its reference. Of two numbers, as a logarithm of the sum would not tell the sums
// of large logits apart.
struct alignas(16) PartState {
    double reference, sum;  // natural; -infinity if there is no weight
};

// What a launch gets whose keys are split over the grid. cuflash/structs.py mirrors it (PART_PARAMS).
struct PartParams : PrefillParams {
    void* part_out;  // (parts, batch, q_rows, heads_q, head_dim_v), of the type that is computed in: results without a sink
    PartState* part_state;  // (parts, batch, q_rows, heads_q)
    i32 parts;    // of a sequence, at most
    i32 least;    // tiles of a part, at least
    i32 queries;  // 1: rows are the query heads of a key/value head, which all stand where that query does; else q_rows
    i32 unused;
};

// A block has a part of the keys. How many parts there are follows from what the block's rows see, in tiles, and from nothing else.
template <class C> struct FpWork<C, true> : FpWork<C, false> {
    using Base = FpWork<C, false>;
    using Base::batch, Base::head, Base::first_column, Base::seq;
    int part;

    __device__ __forceinline__ FpWork(const PartParams& p, u32 block)
        : Base(p, block % blocks_of_part(p)), part(block / blocks_of_part(p)) {
        if (p.upper_left == 0) seq.position = seq.kv_length - p.queries;
    }

    __device__ __forceinline__ KeyRange keys(const PartParams& p) const {
        const int first_row = p.queries == 1 ? 0 : this->first_row(), rows = min(C::M, p.queries - first_row);
        const int position = first_row + seq.position;
        const KeyRange all = Visibility<MASK_BAND>(p, seq).of_any(position, position + rows - 1);
        const int first = all.begin / C::N, tiles = all.empty() ? 0 : (all.end - 1) / C::N - first + 1;
        const int own = min(p.parts, (tiles + p.least - 1) / p.least);
        if (part >= own) return {0, 0};
        const int each = tiles / own, rest = tiles % own, begin = first + part * each + min(part, rest);
        return {max(all.begin, begin * C::N), min(all.end, (begin + each + (part < rest ? 1 : 0)) * C::N)};
    }

    __device__ __forceinline__ KeyRange keys(const PartParams& p, int row) const {
        const KeyRange all = keys(p), own = Base::keys(p, row);
        return {max(all.begin, own.begin), min(all.end, own.end)};
    }

    __device__ __forceinline__ int sink() const { return -1; }

    __device__ __forceinline__ OutRows<typename C::T> out(const PartParams& p) const {
        typename C::T* first = static_cast<typename C::T*>(p.part_out) + place(p, 0) * p.head_dim_v + first_column;
        return {first, i64(p.heads_q) * p.head_dim_v, 1, p.head_dim_v % Chunk<typename C::T>::SIZE == 0};
    }

    __device__ __forceinline__ void put_statistics(const PartParams& p, int row, const RowEnd& end) const {
        p.part_state[place(p, row)] = {end.sum == 0.0 ? double(-infinity()) : end.reference, end.sum};
    }

  private:
    static __device__ __forceinline__ u32 blocks_of_part(const PartParams& p) {
        return u32(p.batch) * u32(p.heads_q) * u32(p.m_tiles) * C::SLICES;
    }

    __device__ __forceinline__ i64 place(const PartParams& p, int row) const {
        return ((i64(part) * p.batch + batch) * p.q_rows + row) * p.heads_q + head;
    }
};
