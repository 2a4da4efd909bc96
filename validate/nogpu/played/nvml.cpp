// NVIDIA's management library, played: one GPU, no link to another, no process that it knows of.
// PyTorch asks it as it counts devices, maps expandable segments and reports that memory has run out.
// Source: docs.nvidia.com/deploy/nvml-api; c10/cuda/driver_api.h (`C10_NVML_DRIVER_API`).
#include <cuda.h>

#include <cstring>

namespace {

constexpr int SUCCESS = 0, NOT_SUPPORTED = 3;

// nvmlGpuFabricInfoV_t begins with its version, which has its size in the lower bytes; a state of 0 says that
// the GPU is part of no fabric.
constexpr unsigned SIZE_OF_VERSION = 0xffffff;

char the_only_one;

}  // namespace

extern "C" {

int nvmlInit() { return SUCCESS; }
int nvmlInit_v2() { return SUCCESS; }
int nvmlInitWithFlags(unsigned) { return SUCCESS; }
int nvmlShutdown() { return SUCCESS; }

int nvmlDeviceGetCount_v2(unsigned* n) {
    *n = 1;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned, void** device) {
    *device = &the_only_one;
    return SUCCESS;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** device) { return nvmlDeviceGetHandleByIndex_v2(0, device); }

int nvmlDeviceGetUUID(void*, char*, unsigned) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, int*) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) { return NOT_SUPPORTED; }

int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* n, void*) {
    *n = 0;
    return SUCCESS;
}

int nvmlDeviceGetGpuFabricInfoV(void*, unsigned* info) {
    std::memset(info + 1, 0, (*info & SIZE_OF_VERSION) - sizeof *info);
    return SUCCESS;
}

int nvmlSystemGetCudaDriverVersion_v2(int* version) {
    *version = CUDA_VERSION;
    return SUCCESS;
}

}  // extern "C"
