// What a prefill launch gets, by value. cuflash/structs.py mirrors it (PREFILL_PARAMS) and every instance asserts the size.
#include "include/types.cuh"

struct Strides {  // of one array, in elements; 0 and negative are fine
    i64 batch, row, head, column;
};

struct PrefillParams {
    const void* q;    // (batch, q_rows, heads_q, head_dim); packed sequences: (q_rows, heads_q, head_dim), strides.batch = 0
    const void* k;    // (batch, k_rows, heads_kv, head_dim); paged: (pages, page_size, heads_kv, head_dim), strides.batch between pages
    const void* v;    // (batch, k_rows, heads_kv, head_dim_v)
    void* out;        // (batch, q_rows, heads_q, head_dim_v)
    float* lse;       // (batch, heads_q, q_rows), or null
    const void* cu_seqlens_q;   // (batch + 1), or null: on the device, like all index arrays; i64, or i32 (see index_bits)
    const void* cu_seqlens_k;   // (batch + 1), or null
    const void* kv_lengths;     // (batch), or null
    const void* kv_start;       // (batch), or null
    const float* alibi_slopes;  // (batch, heads_q), times log2(e) unless there is a bias; or null
    const float* sinks;         // (heads_q), times log2(e); for prefill_fp float64 in natural units; or null
    const void* bias;           // (batch, heads_q, matrix_rows, bias_columns), or null
    const u8* mask;             // (batch, heads_q, matrix_rows, mask_columns), or null
    const void* mod_data;       // what score_mod and mask_mod read
    const i32* page_table;      // (batch, max_pages), or null
    Strides q_stride, k_stride, v_stride, out_stride;
    Strides lse_stride;         // column unused
    Strides bias_stride, mask_stride;  // row: of queries, column: of keys
    i32 batch, heads_q, heads_kv, group;  // group: query heads that share a key/value head
    i32 head_dim, head_dim_v;
    i32 q_rows, k_rows;         // extents: rows of one batch entry, or of the packed array
    i32 m_tiles;                // tiles of query rows of the longest sequence; of all of them where work_item is FLAT
    i32 section;                // (batch, head) pairs whose tiles are handed out together
    i32 window_left, window_right;  // inclusive; at most 2^30, which means unbounded
    i32 upper_left;             // query row r stands at position r instead of r + kv_length - q_length
    i32 out_vector;             // rows of out can be written 16 bytes at a time
    i32 page_size, max_pages;
    float scale;                // of the raw scores; log2(e) is in it unless there is a softcap or a bias
    float softcap;              // log2(e) is in it unless there is a bias
    float logit_scale;          // from what the score kind yields to log2 units
    i32 mask_tail;              // the mask's columns are the last keys of a sequence, keys before them are visible
    i32 matrix_rows;            // extents of bias and mask
    i32 bias_columns, mask_columns;
    i32 bias_vector, mask_vector;  // their rows can be read 8 elements at a time
    i32 pages;                  // that there are; k_rows is then max_pages * page_size
    u32 page_magic;             // key / page_size = key * page_magic >> page_shift
    i32 page_shift;
    i32 index_bits;             // 1, 2, 4, 8: cu_seqlens_q, cu_seqlens_k, kv_lengths, kv_start are i32
    i32 tile_rows;              // queries of a tile, of which m_tiles counts; where heads share tiles (PrefillFa3::PACKED), not its rows
    double scale64, softcap64, logit_scale64;  // of prefill_fp, which has lse and slopes in its own type
    // Of a softcap, for scores s of at most a limit: s * (series[0] + series[1] * s^2 + ...) is the logit in log2 units.
    float near_limit, softcap_limit, near_series[3], softcap_series[5];
    float large_score;          // what the score kind yields that is Fast32::LARGE in log2 units
};
