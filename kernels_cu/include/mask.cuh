// Which keys a query row sees: functions of (query position i, key j), the same for every kernel.
#include "include/matrix.cuh"
#include "include/schedule.cuh"

// Compile-time kinds, combined by |.
constexpr int MASK_LENGTH = 0;  // only kv_start <= j < kv_length
constexpr int MASK_RIGHT = 1;   // and j <= i + right: causal
constexpr int MASK_LEFT = 2;    // and j >= i - left: with MASK_RIGHT, a window
constexpr int MASK_ARRAY = 4;   // and what a boolean array says
constexpr int MASK_BAND = MASK_RIGHT | MASK_LEFT;

struct KeyRange {
    int begin, end;  // begin <= j < end

    __device__ __forceinline__ bool empty() const { return end <= begin; }
};

template <int MASK> struct Visibility {
    int begin, end;   // keys of the sequence
    int left, right;

    __device__ __forceinline__ Visibility(const PrefillParams& p, const Sequence& s)
        : begin(s.kv_start), end(s.kv_length), left(p.window_left), right(p.window_right) {}

    __device__ __forceinline__ Visibility(const PrefillParams& p, const KeyRange& range)
        : begin(range.begin), end(range.end), left(p.window_left), right(p.window_right) {}

    // Forget the keys outside a range that holds all that the block's rows may see: what a row sees stays the same.
    __device__ __forceinline__ void narrow(const KeyRange& range) { begin = range.begin, end = range.end; }

    // Keys that any of the positions first..last may see.
    __device__ __forceinline__ KeyRange of_any(int first, int last) const { return between(first, last); }

    // Keys that each of the positions first..last sees.
    __device__ __forceinline__ KeyRange of_all(int first, int last) const { return between(last, first); }

    // Positions that see any of the keys first_key..last_key, of the sequence's.
    __device__ __forceinline__ KeyRange positions_of_any(int first_key, int last_key) const { return positions(first_key, last_key); }

    // Positions that see each of the keys first_key..last_key, all of which must be keys of the sequence.
    __device__ __forceinline__ KeyRange positions_of_all(int first_key, int last_key) const { return positions(last_key, first_key); }

    // Whether all of the positions first..last see all of the keys first_key..end_key - 1.
    __device__ __forceinline__ bool all(int first, int last, int first_key, int end_key) const {
        const KeyRange whole = of_all(first, last);
        return whole.begin <= first_key && end_key <= whole.end;
    }

  private:
    __device__ __forceinline__ KeyRange positions(int right_of, int left_of) const {
        constexpr int ANY = 1 << 30;  // more than any position
        return {(MASK & MASK_RIGHT) != 0 ? right_of - right : -ANY, (MASK & MASK_LEFT) != 0 ? left_of + left + 1 : ANY};
    }

    // From the first key of one position to the last of another.
    __device__ __forceinline__ KeyRange between(int left_of, int right_of) const {
        return {
            (MASK & MASK_LEFT) != 0 ? max(begin, left_of - left) : begin,
            (MASK & MASK_RIGHT) != 0 ? min(end, right_of + right + 1) : end,
        };
    }
};

// -inf in one row of a lane's scores where keys are invisible; i: the row's position, the rest as in apply_mask.
template <int MASK, class Order, class T, int MT, int NT>
__device__ __forceinline__ void mask_row(T (&s)[MT][NT][4], int row, const Visibility<MASK>& visible, int i, int key) {
    const KeyRange range = visible.of_all(i, i);
    const int count = max(range.end - range.begin, 0), first = key - range.begin;
#pragma unroll
    for (int nt = 0; nt < NT; ++nt)
#pragma unroll
        for (int c = 0; c < 2; ++c)
            if (u32(first + Order::key(nt, c)) >= u32(count)) s[row / 2][nt][row % 2 * 2 + c] = -infinity();
}

// -inf in the scores of a warp that are invisible. Lane l holds, of 16 x 8 tile (mt, nt), rows 16 mt + l / 4 (+ 8) and columns
// 8 nt + 2 (l % 4) (+ 1), which stand for keys as Order says; `position` is that of row l / 4 of the first tile, `key` that of column
// 2 (l % 4).
template <int MASK, class Order, class T, int MT, int NT>
__device__ __forceinline__ void apply_mask(T (&s)[MT][NT][4], const Visibility<MASK>& visible, int position, int key) {
#pragma unroll
    for (int row = 0; row < 2 * MT; ++row) mask_row<MASK, Order>(s, row, visible, position + 8 * row, key);
}

// The same where the lane's rows stand at any positions.
template <int MASK, class Order, class T, int MT, int NT>
__device__ __forceinline__ void apply_mask(T (&s)[MT][NT][4], const Visibility<MASK>& visible, const int (&position)[2 * MT], int key) {
#pragma unroll
    for (int row = 0; row < 2 * MT; ++row) mask_row<MASK, Order>(s, row, visible, position[row], key);
}

// The same where the boolean array has 0.
template <int MT, int NT> __device__ __forceinline__ void apply_mask(float (&s)[MT][NT][4], const MatrixTile<1, MT, 8 * NT>& mask) {
#pragma unroll
    for (int row = 0; row < 2 * MT; ++row)
#pragma unroll
        for (int nt = 0; nt < NT; ++nt)
#pragma unroll
            for (int c = 0; c < 2; ++c)
                if ((mask.at(row, nt, c) & 0xffu << 8 * mask.place(nt, c)) == 0) s[row / 2][nt][row % 2 * 2 + c] = -infinity();
}
