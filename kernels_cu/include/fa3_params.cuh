// What a launch of prefill_fa3.cu gets, by value. cuflash/structs.py mirrors it (FA3_PARAMS) and every instance asserts the size.
#include "include/async.cuh"
#include "include/params.cuh"

struct alignas(64) Fa3Params {
    PrefillParams prefill;
    TensorMap q_map, k_map, v_map;  // (column, row, head, batch); packed sequences: one batch; paged: (column, row, head, page)
    u32* counter;  // 0. A launch counts it up `tiles` times, the blocks' first tiles being theirs from the start, and so to 0 again
    i32 tiles;     // of query rows, of all heads; at least as many as there are blocks
};
