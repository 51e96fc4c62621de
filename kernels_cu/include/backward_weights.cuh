// From raw scores to weights, and from gradients of weights to those of scores, for the kernels of the backward pass with mma.sync: by the
// masks and scores of the forward pass.
#include "include/backward_rows.cuh"
#include "include/mask.cuh"
#include "include/score.cuh"
#include "include/shared_sums.cuh"

// Fragments of a warp: 16 MT rows by KEYS keys. C: MASK, SCORE, MT, KEYS, Order and In, the type of the arrays.
template <class C> struct BackwardWeights {
    static constexpr int MT = C::MT, NT = C::KEYS / 8;
    static constexpr int MASK_BYTES = (C::MASK & MASK_ARRAY) != 0 ? 1 : 0, BIAS_BYTES = bias_bytes(C::SCORE);
    static constexpr bool CAPPED = (C::SCORE & SCORE_SOFTCAP) != 0;
    float S_rmem[MT][NT][4];   // raw scores, then weights
    float dP_rmem[MT][NT][4];  // gradients of weights, then of scores
    float slope_rmem[CAPPED ? MT : 1][CAPPED ? NT : 1][4];  // of the softcap
    MatrixTile<MASK_BYTES, MT, C::KEYS> mask_tile;
    MatrixTile<BIAS_BYTES, MT, C::KEYS> bias_tile;
    float lse[2 * MT], delta[2 * MT];  // of the lane's rows

    // Read what mask and bias have for the warp's rows, from the lane's first one on, and keys.
    __device__ __forceinline__ void fetch(
        const PrefillParams& p, const Sequence& seq, int batch, int head, int row, int key, int lane_key
    ) {
        if constexpr (MASK_BYTES != 0) {
            const int first = p.mask_tail ? seq.kv_length - p.mask_columns : 0;  // the key of the mask's first column
            const Matrix<MASK_BYTES> mask(p.mask, p.mask_stride, batch, head, p.matrix_rows, p.mask_columns, p.mask_vector);
            mask_tile.load(mask, row, key - first, lane_key - first, 1);
        }
        if constexpr (BIAS_BYTES != 0) {
            const Matrix<BIAS_BYTES> bias(p.bias, p.bias_stride, batch, head, p.matrix_rows, p.bias_columns, p.bias_vector);
            bias_tile.load(bias, row, key, lane_key, 0);
        }
    }

    // Scores of rows that see nothing, or are none, become finite: then their weights are 0.
    __device__ __forceinline__ void close_eyes() {
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
#pragma unroll
            for (int nt = 0; nt < NT; ++nt)
#pragma unroll
                for (int c = 0; c < 4; ++c)
                    if (lse[2 * mt + c / 2] == infinity()) S_rmem[mt][nt][c] = 0.0f;
    }

    // S -> weights exp2(logit - lse). `position` and `key` as for apply_mask; `cut`: some row may not see some key.
    __device__ __forceinline__ void weigh(
        const PrefillParams& p, const ScoreTransform<C::SCORE>& score, const Visibility<C::MASK>& visible, int position, int key, bool cut
    ) {
        if constexpr (CAPPED) {
            apply_tanh(S_rmem, score.scale);
#pragma unroll
            for (int mt = 0; mt < MT; ++mt)
#pragma unroll
                for (int nt = 0; nt < NT; ++nt)
#pragma unroll
                    for (int c = 0; c < 4; ++c) slope_rmem[mt][nt][c] = fmaf(-S_rmem[mt][nt][c], S_rmem[mt][nt][c], 1.0f);
        }
        apply_terms<C::SCORE, typename C::Order, typename C::In>(S_rmem, score, bias_tile, position, key);
        if (cut) apply_mask<C::MASK, typename C::Order>(S_rmem, visible, position, key);
        if constexpr (MASK_BYTES != 0) apply_mask(S_rmem, mask_tile);
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
#pragma unroll
            for (int nt = 0; nt < NT; ++nt)
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    float& x = S_rmem[mt][nt][c];
                    x = exp2_fast(fmaf(x, p.logit_scale, -lse[2 * mt + c / 2]));
                    if constexpr (BIAS_BYTES != 0) {  // which may be anything in rows that see nothing, or are none
                        if (lse[2 * mt + c / 2] == infinity()) x = 0.0f;
                    }
                }
    }

    // To the sums of weights times their gradients, of the lane's rows. A weight of 0 adds nothing, whatever its gradient is; bit r of
    // `weighs` tells of row r whether it had another.
    __device__ __forceinline__ void add_products(float (&sum)[2 * MT], u32& weighs) const {
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
#pragma unroll
            for (int nt = 0; nt < NT; ++nt)
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    float& x = sum[2 * mt + c / 2];
                    if (S_rmem[mt][nt][c] == 0.0f) continue;
                    x = fmaf(S_rmem[mt][nt][c], dP_rmem[mt][nt][c], x);
                    weighs |= 1u << (2 * mt + c / 2);
                }
    }

    // Weights, once they are stored, or gradients, once those of the bias are, times the slopes of the softcap.
    __device__ __forceinline__ void cap_weights() {
        if constexpr (CAPPED && BIAS_BYTES == 0) times_slopes(S_rmem);
    }

    __device__ __forceinline__ void cap_gradients() {
        if constexpr (CAPPED && BIAS_BYTES != 0) times_slopes(dP_rmem);
    }

    // Gradients of the bias, in rows before end_row and of keys before end_key. `row` and `key`: the lane's first ones.
    __device__ __forceinline__ void add_dbias(
        const BackwardParams& p, int batch, int head, int row, int end_row, int key, int end_key
    ) const {
        if constexpr (BIAS_BYTES != 0) {
            const Strides& stride = p.dbias_stride;
            const i64 first = batch * stride.batch + head * stride.head + row * stride.row + key * stride.column;
            const int rows = min(end_row, p.prefill.matrix_rows) - row, keys = min(end_key, p.prefill.bias_columns) - key;
#pragma unroll
            for (int r = 0; r < 2 * MT; ++r)
#pragma unroll
                for (int nt = 0; nt < NT; ++nt)
#pragma unroll
                    for (int c = 0; c < 2; ++c) {
                        const int on = C::Order::key(nt, c);
                        const float x = 8 * r < rows && on < keys ? dP_rmem[r / 2][nt][r % 2 * 2 + c] : 0.0f;
                        const i64 place = first + 8 * r * stride.row + on * stride.column;
                        if (p.dbias_shared) add_shared(static_cast<double*>(p.dbias) + place, x, stride.row == 0, stride.column == 0);
                        else if (x != 0.0f) add_gmem(static_cast<float*>(p.dbias) + place, x);
                    }
        }
    }

    // dP -> gradients of scores, but for the scale. A weight of 0 has none, whatever dP is, where it may be that of a key that is not seen.
    __device__ __forceinline__ void differentiate(bool cut) {
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
#pragma unroll
            for (int nt = 0; nt < NT; ++nt)
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    float& x = dP_rmem[mt][nt][c];
                    x = S_rmem[mt][nt][c] * (x - delta[2 * mt + c / 2]);
                }
        if (!cut) return;
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
#pragma unroll
            for (int nt = 0; nt < NT; ++nt)
#pragma unroll
                for (int c = 0; c < 4; ++c)
                    if (S_rmem[mt][nt][c] == 0.0f) dP_rmem[mt][nt][c] = 0.0f;
    }

  private:
    __device__ __forceinline__ void times_slopes(float (&x)[MT][NT][4]) const {
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
#pragma unroll
            for (int nt = 0; nt < NT; ++nt)
#pragma unroll
                for (int c = 0; c < 4; ++c) x[mt][nt][c] *= slope_rmem[mt][nt][c];
    }
};
