// Stages of shared memory that those who load and those who work hand to each other: loaders fill stage 0, 1, ... and 0 again, waiting for
// each to be empty; the others wait for each to be full, use what is there, and release it. Everyone has a Ring, a position of its own.
#include "include/async.cuh"

// What a ring is made of: so many stages of so many bytes, and each stage's two barriers, of 16 bytes together. They begin so many bytes
// behind the first stage.
template <int STAGES_, int BYTES, int BARRIERS> struct Stages {
    static constexpr int STAGES = STAGES_, STAGE_BYTES = BYTES, BARRIERS_SMEM = BARRIERS;
};

template <class C> struct Ring {
    u32 smem;  // where stage 0 is
    int stage = 0;
    u32 parity = 0;  // of the rounds that are over: which phase of the barriers is meant

    __device__ __forceinline__ u32 stage_smem() const { return smem + stage * C::STAGE_BYTES; }
    __device__ __forceinline__ u32 full() const { return smem + C::BARRIERS_SMEM + 16 * stage; }  // what was loaded is there
    __device__ __forceinline__ u32 empty() const { return full() + 8; }                           // nobody needs it any more

    __device__ __forceinline__ void advance() {
        if (++stage == C::STAGES) stage = 0, parity ^= 1;
    }

    // So many stages further, by arithmetic: from a loop the compiler would not know that all threads are at the same one.
    __device__ __forceinline__ void skip(int count) {
        stage += count;
        parity ^= stage / C::STAGES & 1;
        stage %= C::STAGES;
    }

    // By one thread, before the others come; so many arrivals make a stage full, and empty.
    __device__ __forceinline__ void init(int loads, int works) const {
        for (Ring r = *this; r.parity == 0; r.advance()) {
            mbarrier_init(r.full(), loads);
            mbarrier_init(r.empty(), works);
        }
        mbarrier_init_fence();
    }

    // Until the stage is full, for those who work; until it is empty, for those who load: it is so at first.
    __device__ __forceinline__ void wait_full() const { mbarrier_wait(full(), parity); }
    __device__ __forceinline__ void wait_empty() const { mbarrier_wait(empty(), parity ^ 1); }

    // The warp is done with the stage.
    __device__ __forceinline__ void release() const {
        __syncwarp();
        release(thread_index() % 32 == 0);
    }

    // The same where its lanes are at one place anyhow, as after a wait for products: by one of them.
    __device__ __forceinline__ void release(bool one) const {
        if (one) mbarrier_arrive(empty());
    }
};
