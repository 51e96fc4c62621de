// What a prefill launch gets, by value. cuflash/launch.py mirrors it (PREFILL_PARAMS) and every instance asserts the size.
#include "include/types.cuh"

struct Strides {  // of one array, in elements; 0 and negative are fine
    i64 batch, row, head, column;
};

struct PrefillParams {
    const void* q;    // (batch, q_rows, heads_q, head_dim); packed sequences: (q_rows, heads_q, head_dim), strides.batch = 0
    const void* k;    // (batch, k_rows, heads_kv, head_dim)
    const void* v;    // (batch, k_rows, heads_kv, head_dim_v)
    void* out;        // (batch, q_rows, heads_q, head_dim_v)
    float* lse;       // (batch, heads_q, q_rows), or null
    const i64* cu_seqlens_q;    // (batch + 1), or null: on the device, like all index arrays
    const i64* cu_seqlens_k;    // (batch + 1), or null
    const i64* kv_lengths;      // (batch), or null
    const i64* kv_start;        // (batch), or null
    const float* alibi_slopes;  // (batch, heads_q), times log2(e); or null
    const float* sinks;         // (heads_q), times log2(e); or null
    const void* bias;           // (batch, heads_q, rows, columns), or null
    const u8* mask;             // (batch, heads_q, rows, columns), or null
    const void* mod_data;       // what score_mod and mask_mod read
    const i32* page_table;      // (batch, max_pages), or null
    Strides q_stride, k_stride, v_stride, out_stride;
    Strides lse_stride;         // column unused
    Strides bias_stride, mask_stride;  // row: of queries, column: of keys
    i32 batch, heads_q, heads_kv, group;  // group: query heads that share a key/value head
    i32 head_dim, head_dim_v;
    i32 q_rows, k_rows;         // extents: rows of one batch entry, or of the packed array
    i32 m_tiles;                // tiles of query rows of the longest sequence
    i32 section;                // (batch, head) pairs whose tiles are handed out together
    i32 window_left, window_right;  // inclusive; at most 2^30, which means unbounded
    i32 upper_left;             // query row r stands at position r instead of r + kv_length - q_length
    i32 out_vector;             // rows of out can be written 16 bytes at a time
    i32 page_size, max_pages;
    float scale;                // of the raw scores; log2(e) is in it unless the score kind needs natural logits
    float softcap;
    float logit_scale;          // from what the score kind yields to log2 units
    i32 mask_tail;
};
