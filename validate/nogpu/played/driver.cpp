// The CUDA driver, played: what PyTorch's expandable segments, Triton and NVRTC's users ask of it.
// Source: docs.nvidia.com/cuda/cuda-driver-api.
#include <cuda.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstring>

#include "device.h"

using namespace played;

// A function by its name without a version is the newest one that this file's headers know.
void* driver_function(const char* name) {
    for (const char* version : {"_v4", "_v3", "_v2", ""})
        if (void* found = dlsym(RTLD_DEFAULT, (std::string(name) + version).c_str())) return found;
    return nullptr;
}

extern "C" {

CUresult cuInit(unsigned) { return CUDA_SUCCESS; }

CUresult cuDriverGetVersion(int* version) {
    *version = CUDA_VERSION;
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char** text) {
    *text = error == CUDA_SUCCESS ? "no error" : "an error of the played CUDA driver";
    return CUDA_SUCCESS;
}

CUresult cuGetProcAddress(const char* name, void** function, int, cuuint64_t,
                          CUdriverProcAddressQueryResult* result) {
    *function = driver_function(name);
    if (result) *result = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

// Descriptions of tensors for Hopper's copies, which CUTLASS's kernels are launched with and nothing reads

CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                const cuuint64_t*, const cuuint32_t*, const cuuint32_t*,
                                CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                                CUtensorMapFloatOOBfill) {
    std::memset(map, 0, sizeof *map);
    return CUDA_SUCCESS;
}

// Devices and contexts

CUresult cuDeviceGetCount(int* n) {
    *n = 1;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice* device, int) {
    *device = 0;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice* device) { return cuDeviceGet(device, 0); }

CUresult cuDeviceGetName(char* text, int length, CUdevice) {
    std::snprintf(text, length, "%s", gpu().name.c_str());
    return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem(size_t* bytes, CUdevice) {
    *bytes = gpu().memory_bytes;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
    switch (attribute) {
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = gpu().major; break;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = gpu().minor; break;
        case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = gpu().multiprocessors; break;
        case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
        case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = 1024; break;
        case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR:
            *value = gpu().threads_per_multiprocessor;
            break;
        case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
        case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: *value = 65536; break;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: *value = 48 << 10; break;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
            *value = static_cast<int>(gpu().shared_per_block);
            break;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR:
            *value = static_cast<int>(gpu().shared_per_multiprocessor);
            break;
        case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: *value = CLOCK_KHZ; break;
        case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: *value = gpu().memory_clock_khz; break;
        case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: *value = gpu().memory_bus_bits; break;
        case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: *value = 1; break;
        default: *value = 0;
    }
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext* context) {
    static char the_only_one;
    *context = reinterpret_cast<CUcontext>(&the_only_one);
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) { return cuCtxGetCurrent(context); }

CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
    *flags = 0;
    *active = 1;
    return CUDA_SUCCESS;
}

// Virtual memory management: addresses, then physical memory mapped to them

CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*,
                                       CUmemAllocationGranularity_flags) {
    *bytes = 2 << 20;
    return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr* address, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
    *address = reinterpret_cast<CUdeviceptr>(reserve(bytes));
    return *address ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
    unreserve(reinterpret_cast<void*>(address), bytes);
    return CUDA_SUCCESS;
}

// A handle is the size of the memory that it stands for: nothing else of it is ever asked.
CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp*,
                     unsigned long long) {
    *handle = bytes;
    return take(bytes) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    give_back(handle);
    return CUDA_SUCCESS;
}

// Compiled kernels, as Triton loads them

CUresult cuModuleLoadData(CUmodule* module, const void*) {
    *module = static_cast<CUmodule>(handle());
    return CUDA_SUCCESS;
}

CUresult cuModuleLoadDataEx(CUmodule* module, const void*, unsigned, CUjit_option*, void**) {
    return cuModuleLoadData(module, nullptr);
}

CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char*) {
    *function = static_cast<CUfunction>(handle());
    return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction) {
    *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024
             : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS            ? 32
                                                                  : 0;
    return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveClusters(int* n, CUfunction, const CUlaunchConfig*) {
    *n = 1;
    return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr address) {
    void* at = reinterpret_cast<void*>(address);
    if (!on_device(at) && !locked_on_host(at)) return CUDA_ERROR_INVALID_VALUE;
    switch (attribute) {
        case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *static_cast<CUdeviceptr*>(value) = address; break;
        case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
            *static_cast<CUmemorytype*>(value) = on_device(at) ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
            break;
        default: *static_cast<int*>(value) = 0;
    }
    return CUDA_SUCCESS;
}

}  // extern "C"
