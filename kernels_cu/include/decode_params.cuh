// What a decode launch gets, by value. cuflash/structs.py mirrors it (DECODE_PARAMS) and every instance asserts the size.
#include "include/params.cuh"

struct DecodeParams : PrefillParams {  // of which m_tiles, section and tile_rows have no meaning here
    float* part_out;       // (slots, M, DV): the accumulators of a part of the keys
    float2* part_state;    // (slots, M): reference and sum of the part, see SoftmaxState
    u32* arrived;          // (batch, heads): parts that are there; 0 before and after
    i32 rows;              // group * q_rows: what one key/value head is read for
    i32 row_blocks;        // of M rows; heads = heads_kv * row_blocks
    i32 heads_at_once;     // heads whose keys are read at the same time; it divides heads
    i32 runs;              // that the work is dealt out as, at most; there are runs * heads_at_once blocks
    i32 least;             // units of a run, where there are enough
    i32 unit_tiles;        // tiles of a unit, at least
    i32 most_units;        // of a sequence. 0: a unit is a tile, and parts end where runs do; else each unit is a part
    i32 passes;            // over a sequence: heads / heads_at_once
    // Of keys and values in 8 bits: the scale of each token and head (strides: batch or page, row, head), or null: one factor for all.
    const float *k_scale, *v_scale;
    Strides k_scale_stride, v_scale_stride;
    float k_factor, v_factor;
};
