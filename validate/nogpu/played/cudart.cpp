// The CUDA runtime, played: memory and copies are in device.cpp, streams and events in streams.cpp, kernels do
// nothing.
// Functions that are not here succeed and do nothing (validate/nogpu/build.py), but for those that could not
// do so without an answer: graphs and memory shared between processes are refused.
// Source: docs.nvidia.com/cuda/cuda-runtime-api.
#include <cuda_runtime_api.h>
#include <pthread.h>

#include <cstdio>
#include <cstring>

#include "device.h"
#include "streams.h"

using namespace played;

void* driver_function(const char* name);  // driver.cpp

namespace {

cudaError_t made(void** address, void* found) {
    *address = found;
    return found == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
}

bool is_watchdog() {
    static thread_local int known = -1;
    if (known < 0) {
        char name[16] = "";
        pthread_getname_np(pthread_self(), name, sizeof name);
        known = std::strcmp(name, "pt_nccl_watchdg") == 0;
    }
    return known;
}

template <typename Handle>
cudaError_t named(Handle* into) {
    *into = static_cast<Handle>(handle());
    return cudaSuccess;
}

}  // namespace

extern "C" {

// Devices

cudaError_t cudaGetDeviceCount(int* n) {
    *n = 1;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
    *device = 0;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : cudaErrorInvalidDevice; }

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* known, int) {
    std::memset(known, 0, sizeof *known);
    std::snprintf(known->name, sizeof known->name, "%s", gpu().name.c_str());
    known->major = gpu().major;
    known->minor = gpu().minor;
    known->multiProcessorCount = gpu().multiprocessors;
    known->totalGlobalMem = gpu().memory_bytes;
    known->warpSize = WARP;
    known->maxThreadsPerBlock = MOST_THREADS;
    known->maxThreadsPerMultiProcessor = gpu().threads_per_multiprocessor;
    known->maxThreadsDim[0] = known->maxThreadsDim[1] = MOST_THREADS;
    known->maxThreadsDim[2] = 64;
    known->maxGridSize[0] = MOST_GRID;
    known->maxGridSize[1] = known->maxGridSize[2] = 65535;
    known->regsPerBlock = known->regsPerMultiprocessor = REGISTERS;
    known->sharedMemPerBlock = 48 << 10;
    known->sharedMemPerBlockOptin = gpu().shared_per_block;
    known->sharedMemPerMultiprocessor = gpu().shared_per_multiprocessor;
    known->maxBlocksPerMultiProcessor = MOST_BLOCKS;
    known->l2CacheSize = L2_BYTES;
    known->concurrentKernels = known->unifiedAddressing = 1;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
    switch (attribute) {
        case cudaDevAttrComputeCapabilityMajor: *value = gpu().major; break;
        case cudaDevAttrComputeCapabilityMinor: *value = gpu().minor; break;
        case cudaDevAttrMultiProcessorCount: *value = gpu().multiprocessors; break;
        case cudaDevAttrWarpSize: *value = WARP; break;
        case cudaDevAttrMaxThreadsPerBlock:
        case cudaDevAttrMaxBlockDimX:
        case cudaDevAttrMaxBlockDimY: *value = MOST_THREADS; break;
        case cudaDevAttrMaxBlockDimZ: *value = 64; break;
        case cudaDevAttrMaxGridDimX: *value = MOST_GRID; break;
        case cudaDevAttrMaxGridDimY:
        case cudaDevAttrMaxGridDimZ: *value = 65535; break;
        case cudaDevAttrMaxThreadsPerMultiProcessor: *value = gpu().threads_per_multiprocessor; break;
        case cudaDevAttrMaxBlocksPerMultiprocessor: *value = MOST_BLOCKS; break;
        case cudaDevAttrMaxRegistersPerBlock:
        case cudaDevAttrMaxRegistersPerMultiprocessor: *value = REGISTERS; break;
        case cudaDevAttrMaxSharedMemoryPerBlock: *value = 48 << 10; break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = static_cast<int>(gpu().shared_per_block); break;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
            *value = static_cast<int>(gpu().shared_per_multiprocessor);
            break;
        case cudaDevAttrL2CacheSize: *value = L2_BYTES; break;
        case cudaDevAttrClockRate: *value = CLOCK_KHZ; break;
        case cudaDevAttrMemoryClockRate: *value = gpu().memory_clock_khz; break;
        case cudaDevAttrGlobalMemoryBusWidth: *value = gpu().memory_bus_bits; break;
        case cudaDevAttrUnifiedAddressing:
        case cudaDevAttrConcurrentKernels:
        case cudaDevAttrCooperativeLaunch: *value = 1; break;
        default: *value = 0;
    }
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int) {
    std::snprintf(text, length, "0000:00:00.0");
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
    *can = 0;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

const char* cudaGetErrorName(cudaError_t error) {
    switch (error) {
        case cudaSuccess: return "cudaSuccess";
        case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
        case cudaErrorNotSupported: return "cudaErrorNotSupported";
        default: return "cudaErrorUnknown";
    }
}

const char* cudaGetErrorString(cudaError_t error) {
    switch (error) {
        case cudaSuccess: return "no error";
        case cudaErrorMemoryAllocation: return "out of memory";
        case cudaErrorNotSupported: return "operation not supported by the played CUDA runtime";
        default: return "an error of the played CUDA runtime";
    }
}

// Memory

cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
    *total_bytes = gpu().memory_bytes;
    *free_bytes = gpu().memory_bytes - used_bytes();
    return cudaSuccess;
}

cudaError_t cudaMalloc(void** address, size_t bytes) { return made(address, allocate(bytes)); }

cudaError_t cudaMallocAsync(void** address, size_t bytes, cudaStream_t) { return cudaMalloc(address, bytes); }

cudaError_t cudaMallocManaged(void** address, size_t bytes, unsigned) { return cudaMalloc(address, bytes); }

cudaError_t cudaFree(void* address) {
    return address == nullptr || release(address) ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t cudaFreeAsync(void* address, cudaStream_t) { return cudaFree(address); }

cudaError_t cudaHostAlloc(void** address, size_t bytes, unsigned) {
    return made(address, allocate_on_host(bytes));
}

cudaError_t cudaMallocHost(void** address, size_t bytes) { return made(address, allocate_on_host(bytes)); }

cudaError_t cudaFreeHost(void* address) {
    return address == nullptr || release_on_host(address) ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t cudaHostRegister(void* address, size_t bytes, unsigned) {
    lock_on_host(address, bytes);
    return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* address) {
    return unlock_on_host(address) ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* known, const void* address) {
    std::memset(known, 0, sizeof *known);
    bool ours = on_device(address), locked = !ours && locked_on_host(address);
    known->type = ours     ? cudaMemoryTypeDevice
                  : locked ? cudaMemoryTypeHost
                           : cudaMemoryTypeUnregistered;
    known->devicePointer = ours || locked ? const_cast<void*>(address) : nullptr;
    known->hostPointer = ours ? nullptr : const_cast<void*>(address);
    return cudaSuccess;
}

cudaError_t cudaGetSymbolAddress(void** address, const void*) {
    static char symbol[4096];
    *address = symbol;
    return cudaSuccess;
}

cudaError_t cudaMemset(void* to, int value, size_t bytes) {
    set(to, value, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
    set(to, value, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
    copy(to, from, bytes);
    host_waits_for_stream(nullptr);
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
    copy(to, from, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t) {
    copy(to, from, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind, cudaStream_t) {
    for (size_t row = 0; row < height; ++row)
        copy(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width);
    return cudaSuccess;
}

// Streams and events: work is over at once, or once the host has waited for it (streams.h). But NCCL's watchdog,
// which drops what a collective holds once its event is over, and looks ten times a second, finds that over
// which the host has waited for the whole device since: else what is alive would hang on when it looks.
// Source: torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp (`Watchdog::runLoop`).

cudaError_t cudaStreamCreate(cudaStream_t* stream) { return named(stream); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return named(stream); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) { return named(stream); }

cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
    *priority = 0;
    return cudaSuccess;
}

cudaError_t cudaStreamGetFlags(cudaStream_t, unsigned* flags) {
    *flags = cudaStreamNonBlocking;
    return cudaSuccess;
}

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t call, void* data, unsigned) {
    call(stream, cudaSuccess, data);
    return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t call, void* data) {
    call(data);
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
    host_waits_for_device();
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    host_waits_for_stream(stream);
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    stream_waits(stream, event);
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
    *event = static_cast<cudaEvent_t>(new_event());
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    destroy_event(event);
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    record(event, stream);
    return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
    return cudaEventRecord(event, stream);
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
    bool over = is_watchdog() ? is_over_for_watchdog(event) : is_over(event);
    return over ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    host_waits_for_event(event);
    return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
    *milliseconds = 0;
    return cudaSuccess;
}

// Graphs and memory of other processes

cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

#if CUDART_VERSION >= 13000
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
#else
cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id,
                                        cudaGraph_t*, const cudaGraphNode_t**, size_t*) {
#endif
    *status = cudaStreamCaptureStatusNone;
    if (id) *id = 0;
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) { return cudaErrorNotSupported; }
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t*, cudaGraph_t, unsigned long long) {
    return cudaErrorNotSupported;
}
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t*, void*) { return cudaErrorNotSupported; }
cudaError_t cudaIpcOpenMemHandle(void**, cudaIpcMemHandle_t, unsigned) { return cudaErrorNotSupported; }
cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t*, cudaEvent_t) { return cudaErrorNotSupported; }
cudaError_t cudaIpcOpenEventHandle(cudaEvent_t*, cudaIpcEventHandle_t) { return cudaErrorNotSupported; }

// Kernels: how many blocks of one fit a multiprocessor is not known, and assumed

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* known, const void*) {
    std::memset(known, 0, sizeof *known);
    known->maxThreadsPerBlock = MOST_THREADS;
    known->numRegs = 32;
    known->binaryVersion = known->ptxVersion = gpu().kernels;
    known->maxDynamicSharedSizeBytes = static_cast<int>(gpu().shared_per_block);
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
    *blocks = 2;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t,
                                                                   unsigned) {
    *blocks = 2;
    return cudaSuccess;
}

void** __cudaRegisterFatBinary(void*) {
    static void* registered[4];
    return registered;
}

// The driver's functions, which PyTorch asks the runtime for by name: those of driver.cpp

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
    *function = driver_function(name);
    if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}

#if CUDART_VERSION < 13000
cudaError_t cudaGetDriverEntryPoint(const char* name, void** function, unsigned long long flags,
                                    cudaDriverEntryPointQueryResult* result) {
    return cudaGetDriverEntryPointByVersion(name, function, CUDART_VERSION, flags, result);
}
#endif

}  // extern "C"
