// Arrays over (query row, key) of one (batch, head), the bias and the mask: how a lane gets its share of a tile of scores.
#include "include/layout.cuh"

// BYTES of one element: 1, 2 or 4.
template <int BYTES> struct Matrix {
    const u8* first_gmem;  // row 0, column 0
    i64 row_stride, column_stride;  // in bytes
    int rows, columns;
    bool vector;  // rows can be read 8 elements at a time

    __device__ __forceinline__ Matrix(const void* base, const Strides& s, i64 batch, i64 head, int rows, int columns, bool vector)
        : first_gmem(static_cast<const u8*>(base) + (batch * s.batch + head * s.head) * BYTES), row_stride(s.row * BYTES),
          column_stride(s.column * BYTES), rows(rows), columns(columns), vector(vector) {}

    // Bits of an element; `outside` where there is none. Rows that do not exist count as the last one: nobody wants their scores.
    __device__ __forceinline__ u32 element(int row, int column, u32 outside) const {
        if (u32(column) >= u32(columns)) return outside;
        const u8* at = first_gmem + min(row, rows - 1) * row_stride + column * column_stride;
        if constexpr (BYTES == 1) return *at;
        else if constexpr (BYTES == 2) return *reinterpret_cast<const u16*>(at);
        else return *reinterpret_cast<const u32*>(at);
    }
};

template <> struct Matrix<0> {  // no such array
    __device__ __forceinline__ Matrix(const void*, const Strides&, i64, i64, int, int, bool) {}
};

// What a lane needs of a matrix for its scores of a tile, which are in grouped order: of each of its rows, 8 neighbouring elements in
// every 32. It is read a tile ahead, where the weights of this tile have been rounded.
template <int BYTES, int MT, int N> struct MatrixTile {
    static constexpr int ROWS = 2 * MT, GROUPS = N / 32, WORDS = 2 * BYTES;
    static constexpr int PER_WORD = 4 / BYTES;
    u32 word[ROWS][GROUPS][WORDS];

    // row: the lane's first one. column: the tile's first one, which may be negative; lane_column: the lane's first one.
    __device__ __forceinline__ void load(const Matrix<BYTES>& matrix, int row, int column, int lane_column, u32 outside) {
        if (matrix.vector && column >= 0 && column + N <= matrix.columns) {
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const u8* from = matrix.first_gmem + min(row + 8 * r, matrix.rows - 1) * matrix.row_stride + lane_column * BYTES;
#pragma unroll
                for (int group = 0; group < GROUPS; ++group, from += 32 * BYTES) {
                    u32(&to)[WORDS] = word[r][group];
                    if constexpr (WORDS == 2) load_gmem(to[0], to[1], from);
#pragma unroll
                    for (int i = 0; i + 4 <= WORDS; i += 4) load_gmem(to[i], to[i + 1], to[i + 2], to[i + 3], from + 4 * i);
                }
            }
        } else {
#pragma unroll
            for (int r = 0; r < ROWS; ++r)
#pragma unroll
                for (int i = 0; i < GROUPS * WORDS; ++i) {
                    u32 to = 0;
#pragma unroll
                    for (int e = 0; e < PER_WORD; ++e) {
                        const int at = lane_column + i / WORDS * 32 + i % WORDS * PER_WORD + e;
                        to |= matrix.element(row + 8 * r, at, outside) << 8 * BYTES * e;
                    }
                    word[r][i / WORDS][i % WORDS] = to;
                }
        }
    }

    // The word that has element (r, nt, c) of the lane's scores, and which of the elements in the word it is.
    __device__ __forceinline__ u32 at(int r, int nt, int c) const { return word[r][nt / 4][(nt % 4 * 2 + c) / PER_WORD]; }
    static __device__ constexpr int place(int nt, int c) { return (nt % 4 * 2 + c) % PER_WORD; }
};

template <int MT, int N> struct MatrixTile<0, MT, N> {};
