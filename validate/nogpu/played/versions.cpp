// The versions that NVIDIA's headers state, so that PyTorch finds those that it was built for.
#include <cublas_api.h>
#include <nccl.h>

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}

size_t cublasLtGetVersion() { return CUBLAS_VERSION; }

}  // extern "C"
