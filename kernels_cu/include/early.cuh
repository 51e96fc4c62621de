// Kernels that begin before the one before them on the stream has ended: programmatic dependent launch, which GPUs have from sm_90 on.
//
// cuflash/driver.py launches them so. Each of their threads waits for that kernel before it touches memory that other kernels may write or
// still read, whatever it then does: the next kernel waits for this one alone.
#include "include/types.cuh"

// __CUDA_ARCH__ is the GPU itself, on which it depends how the kernel is launched; the code paths of CUFLASH_ARCH may be another one's.

// The kernel before has ended, and what it has written is there.
__device__ __forceinline__ void wait_for_kernel_before() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel may begin as soon as every block has said so.
__device__ __forceinline__ void let_next_kernel_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
