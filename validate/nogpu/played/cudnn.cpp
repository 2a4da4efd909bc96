// cuDNN: its handle is played, its graphs are the real library's own. That library is loaded a second time, in
// a namespace of its own that nothing here is seen from, and plans without a device, as cuDNN's ahead-of-time
// compilation does: operations, the heuristics that choose an engine, and the workspace that it needs are real.
// Plans are never executed; those of engines that compile their kernels then (attention) are not even finished,
// and their workspace is what the engine's configuration states.
// Source: docs.nvidia.com/deeplearning/cudnn/backend; docs.nvidia.com/deeplearning/cudnn/frontend,
// "Deviceless Ahead-of-time Compilation"; cudnn_graph_v9.h.
#include <cudnn.h>
#include <dlfcn.h>
#include <locale.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "device.h"

using namespace played;

namespace {

void* loaded(Lmid_t where, const char* name) {
    void* found = dlmopen(where, name, RTLD_NOW | RTLD_LOCAL);
    if (found == nullptr) std::fprintf(stderr, "%s\n", dlerror()), std::abort();
    return found;
}

// The first library of the namespace is a driver without a device, so that cuDNN does not find the played one.
void* real_library() {
    static void* const library = [] {
        Lmid_t apart;
        dlinfo(loaded(LM_ID_NEWLM, setting("MEMPLAN_NOGPU_CUDNN_DRIVER")), RTLD_DI_LMID, &apart);
        return loaded(apart, setting("MEMPLAN_NOGPU_CUDNN"));
    }();
    return library;
}

void* symbol(const char* name) {
    void* found = dlsym(real_library(), name);
    if (found == nullptr) std::fprintf(stderr, "%s\n", dlerror()), std::abort();
    return found;
}

// A thread that the process's own C library started has no locale yet in that of the namespace.
template <typename Function>
Function* real(const char* name) {
    static thread_local const bool has_a_locale = [] {
        return reinterpret_cast<decltype(&uselocale)>(symbol("uselocale"))(LC_GLOBAL_LOCALE) != nullptr;
    }();
    static_cast<void>(has_a_locale);
    return reinterpret_cast<Function*>(symbol(name));
}

// What cuDNN is told of the GPU; the names are those of its own JSON.
std::string properties() {
    std::string text = "{\"deviceName\":\"" + gpu().name + "\"";
    auto add = [&](const char* name, size_t value) {
        text += std::string(",\"") + name + "\":" + std::to_string(value);
    };
    add("cudaDeviceId", 0);
    add("pciDeviceId", 0);
    add("deviceVer", 100 * gpu().major + 10 * gpu().minor);
    add("driverVer", CUDART_VERSION);
    add("multiProcessorCount", gpu().multiprocessors);
    add("totalGlobalMem", gpu().memory_bytes);
    add("l2CacheSize", L2_BYTES);
    add("smClockRateKHz", CLOCK_KHZ);
    add("memClockRateKHz", gpu().memory_clock_khz);
    add("warpSize", WARP);
    add("regsPerBlock", REGISTERS);
    add("maxRegistersPerSM", REGISTERS);
    add("maxCtasPerSM", MOST_BLOCKS);
    add("maxThreadsPerBlock", MOST_THREADS);
    add("maxThreadsPerSM", gpu().threads_per_multiprocessor);
    add("maxSharedMemoryPerBlock", 48 << 10);
    add("maxSharedMemoryPerBlockOptin", gpu().shared_per_block);
    add("reservedSharedMemoryPerBlock", gpu().shared_per_multiprocessor - gpu().shared_per_block);
    add("isTccDriver", 0);
    add("supportCoopLaunch", 1);
    return text + ",\"maxGridSize\":[" + std::to_string(MOST_GRID) + ",65535,65535]" +
           ",\"maxBlockSize\":[" + std::to_string(MOST_THREADS) + "," + std::to_string(MOST_THREADS) + ",64]}";
}

cudnnBackendDescriptor_t described() {
    static cudnnBackendDescriptor_t const known = [] {
        cudnnBackendDescriptor_t made = nullptr;
        cudnnBackendCreateDescriptor(CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR, &made);
        std::string text = properties();
        cudnnBackendSetAttribute(made, CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, CUDNN_TYPE_CHAR, text.size(),
                                 text.data());
        cudnnStatus_t status = cudnnBackendFinalize(made);
        if (status != CUDNN_STATUS_SUCCESS) std::fprintf(stderr, "cuDNN refuses %s\n", text.c_str()), std::abort();
        return made;
    }();
    return known;
}

template <typename Value>
Value asked(cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t name,
            cudnnBackendAttributeType_t type, Value value) {
    int64_t n = 0;
    real<decltype(cudnnBackendGetAttribute)>("cudnnBackendGetAttribute")(descriptor, name, type, 1, &n, &value);
    return value;
}

bool compiles_kernels(cudnnBackendDescriptor_t configuration) {
    cudnnBackendDescriptor_t engine = nullptr;
    real<decltype(cudnnBackendCreateDescriptor)>("cudnnBackendCreateDescriptor")(CUDNN_BACKEND_ENGINE_DESCRIPTOR,
                                                                                 &engine);
    asked(configuration, CUDNN_ATTR_ENGINECFG_ENGINE, CUDNN_TYPE_BACKEND_DESCRIPTOR, engine);
    cudnnBackendBehaviorNote_t notes[CUDNN_BEHAVIOR_NOTE_TYPE_COUNT];
    int64_t n = 0;
    real<decltype(cudnnBackendGetAttribute)>("cudnnBackendGetAttribute")(
        engine, CUDNN_ATTR_ENGINE_BEHAVIOR_NOTE, CUDNN_TYPE_BEHAVIOR_NOTE, CUDNN_BEHAVIOR_NOTE_TYPE_COUNT, &n,
        notes);
    real<decltype(cudnnBackendDestroyDescriptor)>("cudnnBackendDestroyDescriptor")(engine);
    return std::find(notes, notes + n, CUDNN_BEHAVIOR_NOTE_RUNTIME_COMPILATION) != notes + n;
}

// By which attribute a descriptor that depends on the device is told of it, last of all.
cudnnBackendAttributeName_t device_of(cudnnBackendDescriptorType_t type) {
    switch (type) {
        case CUDNN_BACKEND_ENGINE_DESCRIPTOR: return CUDNN_ATTR_ENGINE_DEVICEPROP;
        case CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR: return CUDNN_ATTR_ENGINEHEUR_DEVICEPROP;
        default: return CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP;
    }
}

// What is to be known of a descriptor that depends on the device: its type, and a plan's engine configuration.
struct Known {
    cudnnBackendDescriptorType_t type;
    cudnnBackendDescriptor_t configuration;
};

std::map<cudnnBackendDescriptor_t, Known>& known() {
    static auto* const all = new std::map<cudnnBackendDescriptor_t, Known>;
    return *all;
}
std::mutex guard;

bool find(cudnnBackendDescriptor_t descriptor, Known* into) {
    std::lock_guard<std::mutex> locked(guard);
    auto found = known().find(descriptor);
    if (found != known().end()) *into = found->second;
    return found != known().end();
}

}  // namespace

extern "C" {

size_t cudnnGetVersion() { return CUDNN_VERSION; }
size_t cudnnGetCudartVersion() { return CUDART_VERSION; }

const char* cudnnGetErrorString(cudnnStatus_t status) {
    return real<decltype(cudnnGetErrorString)>("cudnnGetErrorString")(status);
}

void cudnnGetLastErrorString(char* text, size_t length) {
    real<decltype(cudnnGetLastErrorString)>("cudnnGetLastErrorString")(text, length);
}

cudnnStatus_t cudnnGetProperty(libraryPropertyType part, int* value) {
    *value = part == MAJOR_VERSION   ? CUDNN_MAJOR
             : part == MINOR_VERSION ? CUDNN_MINOR
                                     : CUDNN_PATCHLEVEL;
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnCreate(cudnnHandle_t* made) {
    *made = static_cast<cudnnHandle_t>(handle());
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnGetStream(cudnnHandle_t, cudaStream_t* stream) {
    *stream = nullptr;
    return CUDNN_STATUS_SUCCESS;
}

// Batch norm asks for its sizes by a handle, so they are no one's to tell here: none, as its first functions
// (`cudnnBatchNormalizationForwardTraining`, `cudnnBatchNormalizationBackward`) take none. What a recurrent
// network keeps has no such bound, and is refused.

cudnnStatus_t cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(
    cudnnHandle_t, cudnnBatchNormMode_t, cudnnBatchNormOps_t, const cudnnTensorDescriptor_t,
    const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t,
    const cudnnActivationDescriptor_t, size_t* bytes) {
    *bytes = 0;
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnGetBatchNormalizationBackwardExWorkspaceSize(
    cudnnHandle_t, cudnnBatchNormMode_t, cudnnBatchNormOps_t, const cudnnTensorDescriptor_t,
    const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t,
    const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t, const cudnnActivationDescriptor_t,
    size_t* bytes) {
    *bytes = 0;
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnGetBatchNormalizationTrainingExReserveSpaceSize(
    cudnnHandle_t, cudnnBatchNormMode_t, cudnnBatchNormOps_t, const cudnnActivationDescriptor_t,
    const cudnnTensorDescriptor_t, size_t* bytes) {
    *bytes = 0;
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnGetRNNWeightSpaceSize(cudnnHandle_t, cudnnRNNDescriptor_t, size_t*) {
    return CUDNN_STATUS_NOT_SUPPORTED;
}

cudnnStatus_t cudnnGetRNNTempSpaceSizes(cudnnHandle_t, cudnnRNNDescriptor_t, cudnnForwardMode_t,
                                        cudnnRNNDataDescriptor_t, size_t*, size_t*) {
    return CUDNN_STATUS_NOT_SUPPORTED;
}

cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type, cudnnBackendDescriptor_t* made) {
    cudnnStatus_t status =
        real<decltype(cudnnBackendCreateDescriptor)>("cudnnBackendCreateDescriptor")(type, made);
    bool depends = type == CUDNN_BACKEND_ENGINE_DESCRIPTOR || type == CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR ||
                   type == CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR;
    std::lock_guard<std::mutex> locked(guard);
    if (status == CUDNN_STATUS_SUCCESS && depends) known()[*made] = {type, nullptr};
    return status;
}

cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t descriptor) {
    {
        std::lock_guard<std::mutex> locked(guard);
        known().erase(descriptor);
    }
    return real<decltype(cudnnBackendDestroyDescriptor)>("cudnnBackendDestroyDescriptor")(descriptor);
}

// The played handle is not the real library's.
cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t n, const void* from) {
    if (type == CUDNN_TYPE_HANDLE) return CUDNN_STATUS_SUCCESS;
    if (name == CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG) {
        std::lock_guard<std::mutex> locked(guard);
        known()[descriptor].configuration = *static_cast<const cudnnBackendDescriptor_t*>(from);
    }
    return real<decltype(cudnnBackendSetAttribute)>("cudnnBackendSetAttribute")(descriptor, name, type, n, from);
}

cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t descriptor) {
    Known it{};
    if (find(descriptor, &it)) {
        cudnnBackendDescriptor_t device = described();
        cudnnStatus_t status = real<decltype(cudnnBackendSetAttribute)>("cudnnBackendSetAttribute")(
            descriptor, device_of(it.type), CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &device);
        if (status != CUDNN_STATUS_SUCCESS) return status;
        if (it.configuration && compiles_kernels(it.configuration)) return CUDNN_STATUS_SUCCESS;
    }
    return real<decltype(cudnnBackendFinalize)>("cudnnBackendFinalize")(descriptor);
}

cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t const descriptor, cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t requested, int64_t* n,
                                       void* into) {
    auto get = real<decltype(cudnnBackendGetAttribute)>("cudnnBackendGetAttribute");
    Known it{};
    if (name == CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE && find(descriptor, &it))
        return get(it.configuration, CUDNN_ATTR_ENGINECFG_WORKSPACE_SIZE, type, requested, n, into);
    return get(descriptor, name, type, requested, n, into);
}

}  // extern "C"
