// cuBLAS and cuBLASLt, played: handles and descriptors; products do nothing. Their workspaces are PyTorch's own
// allocations, which are real.
// Source: docs.nvidia.com/cuda/cublas; cublas_api.h, cublasLt.h.
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "device.h"

using namespace played;

namespace {

constexpr size_t DESCRIPTOR_BYTES = 1024;  // more than any of cuBLASLt's structs has

// cublasLtMatmulHeuristicResult_t
struct Found {
    uint64_t algorithm[8];
    size_t workspace_bytes;
    int status;
    float waves;
    int reserved[4];
};

int described(void** descriptor) {
    *descriptor = std::calloc(1, DESCRIPTOR_BYTES);
    return 0;
}

}  // namespace

extern "C" {

int cublasCreate_v2(void** made) {
    *made = handle();
    return 0;
}

int cublasLtCreate(void** made) { return cublasCreate_v2(made); }

int cublasGetPointerMode_v2(void*, int* mode) {
    *mode = 0;
    return 0;
}

int cublasGetMathMode(void*, int* mode) {
    *mode = 0;
    return 0;
}

int cublasLtMatmulDescCreate(void** descriptor, int, int) { return described(descriptor); }
int cublasLtMatmulPreferenceCreate(void** descriptor) { return described(descriptor); }
int cublasLtMatrixLayoutCreate(void** descriptor, int, uint64_t, uint64_t, int64_t) {
    return described(descriptor);
}

int cublasLtMatmulDescDestroy(void* descriptor) {
    std::free(descriptor);
    return 0;
}

int cublasLtMatmulPreferenceDestroy(void* descriptor) { return cublasLtMatmulDescDestroy(descriptor); }
int cublasLtMatrixLayoutDestroy(void* descriptor) { return cublasLtMatmulDescDestroy(descriptor); }

int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, Found* found, int* n) {
    std::memset(found, 0, sizeof *found);
    *n = 1;
    return 0;
}

}  // extern "C"
