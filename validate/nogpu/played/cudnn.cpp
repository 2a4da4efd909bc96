// cuDNN, played: the graphs that PyTorch and cuDNN's frontend (compiled into PyTorch) describe are accepted,
// one engine is found for each, and it does nothing. What the frontend itself adds to a plan's workspace is
// real; what an engine would need beyond that is known to no one without a GPU, and is none here.
// Source: docs.nvidia.com/deeplearning/cudnn/backend; cudnn_graph_v9.h.
#include <cudnn_graph.h>
#include <cudnn_version.h>

#include <cstring>
#include <map>
#include <vector>

#include "device.h"

using namespace played;

namespace {

struct Attribute {
    int64_t n;
    std::vector<char> bytes;
};

size_t element_bytes(cudnnBackendAttributeType_t type) {
    switch (type) {
        case CUDNN_TYPE_HANDLE:
        case CUDNN_TYPE_INT64:
        case CUDNN_TYPE_DOUBLE:
        case CUDNN_TYPE_VOID_PTR:
        case CUDNN_TYPE_BACKEND_DESCRIPTOR: return 8;
        case CUDNN_TYPE_BOOLEAN:
        case CUDNN_TYPE_CHAR: return 1;
        case CUDNN_TYPE_FRACTION: return 16;
        default: return 4;
    }
}

template <typename Integer>
cudnnStatus_t one(Integer value, int64_t requested, int64_t* n, void* into) {
    if (n) *n = 1;
    if (requested && into) std::memcpy(into, &value, sizeof value);
    return CUDNN_STATUS_SUCCESS;
}

}  // namespace

struct cudnnBackendDescriptor {
    std::map<int, Attribute> attributes;
};

extern "C" {

size_t cudnnGetVersion() { return CUDNN_VERSION; }
size_t cudnnGetCudartVersion() { return CUDART_VERSION; }
const char* cudnnGetErrorString(cudnnStatus_t status) {
    return status == CUDNN_STATUS_SUCCESS ? "CUDNN_STATUS_SUCCESS" : "an error of the played cuDNN";
}
void cudnnGetLastErrorString(char* text, size_t length) {
    if (length) text[0] = 0;
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

cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t, cudnnBackendDescriptor_t* made) {
    *made = new cudnnBackendDescriptor;
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t descriptor) {
    delete static_cast<cudnnBackendDescriptor*>(descriptor);
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t n, const void* from) {
    const char* bytes = static_cast<const char*>(from);
    auto& attributes = static_cast<cudnnBackendDescriptor*>(descriptor)->attributes;
    attributes[name] = {n, std::vector<char>(bytes, bytes + n * element_bytes(type))};
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t const descriptor, cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t requested, int64_t* n,
                                       void* into) {
    switch (name) {
        case CUDNN_ATTR_ENGINEHEUR_RESULTS:  // the caller's own descriptors, one of which is found
        case CUDNN_ATTR_ENGINECFG_ENGINE:
            if (n) *n = 1;
            return CUDNN_STATUS_SUCCESS;
        case CUDNN_ATTR_OPERATIONGRAPH_ENGINE_GLOBAL_COUNT: return one<int64_t>(1, requested, n, into);
        case CUDNN_ATTR_ENGINE_GLOBAL_INDEX:
        case CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE:
        case CUDNN_ATTR_ENGINECFG_WORKSPACE_SIZE: return one<int64_t>(0, requested, n, into);
        case CUDNN_ATTR_ENGINECFG_SHARED_MEMORY_USED: return one<int32_t>(0, requested, n, into);
        default: break;
    }
    const auto& attributes = static_cast<const cudnnBackendDescriptor*>(descriptor)->attributes;
    auto known = attributes.find(name);
    int64_t found = known == attributes.end() ? 0 : known->second.n;
    if (n) *n = found;
    int64_t copied = requested < found ? requested : found;
    if (copied > 0 && into) std::memcpy(into, known->second.bytes.data(), copied * element_bytes(type));
    return CUDNN_STATUS_SUCCESS;
}

}  // extern "C"
