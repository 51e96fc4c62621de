// What the launches of a backward pass get, by value. cuflash/structs.py mirrors it (BACKWARD_PARAMS) and every instance asserts the size.
#include "include/params.cuh"

constexpr int FIRST_TURN = 4, TURNS = 2;

struct BackwardParams {
    PrefillParams prefill;  // out and lse are those of the forward pass, and read
    const void* dout;       // (batch, q_rows, heads_q, head_dim_v); packed sequences as in PrefillParams
    const float* dlse;      // (batch, heads_q, q_rows), or null
    void* dq;               // shapes of q, k and v
    void* dk;
    void* dv;
    // Of each row of each query head, in places: see first_place_of() in backward_rows.cuh.
    float* row_lse;         // (heads_q, places): the log-sum-exp in log2 units; +inf where there is no row, or one without keys
    float* row_delta;       // (heads_q, places): rowsum(dO * O) - dLSE; 0 there
    float* dq_sum;          // (heads_q, places / tile_rows, numbers of a tile in the order of its kernel): added up by blocks of keys
    void* dbias;            // as the bias, added up, so 0 before: float32, or float64 if several logits share an element; or null
    float* dsinks;          // (heads_q), or null
    // Where dQ is added up in a fixed order, or null: how many blocks have begun, whether one gave up waiting; from FIRST_TURN on, TURNS
    // numbers of each tile of queries, for half of its sums each, or one for all: the tile of keys whose turn it is to add to them.
    u32* dq_turns;
    Strides dout_stride, dlse_stride, dq_stride, dk_stride, dv_stride;
    Strides dbias_stride;   // row: of queries, column: of keys
    i64 places;             // of all rows of a head
    i32 tile_rows;          // queries of a step
    i32 n_tiles;            // tiles of keys of the longest sequence
    i32 dq_columns;         // of dq_sum: the padded head size
    float scale;            // natural: of dq and dk
    i32 dbias_shared;       // strides of dbias are 0 where an element is shared
    i32 turn_keys;          // of a tile of keys, where there is an order
};
