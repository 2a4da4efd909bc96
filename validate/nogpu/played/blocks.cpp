// Blocks that PyTorch's caching allocator hands out, as it reports them to PyTorch's profiler: this function
// stands before PyTorch's own of the same name, forgets what an earlier tensor's copy left in the block, and
// passes the report on. So a new tensor reads as zeros wherever it lies, until something is copied to it.
// Source: c10/core/Allocator.h; c10/cuda/CUDACachingAllocator.cpp (`alloc_found_block`).
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "device.h"

namespace c10 {

struct Device {
    int8_t type, index;
};

constexpr int8_t CUDA = 1;  // c10::DeviceType::CUDA

using Report = void(void* block, int64_t bytes, size_t allocated, size_t reserved, Device);

// PyTorch's own function. Its library was loaded for Python's module alone, so it is asked for by name.
Report* own_report() {
    void* library = dlopen("libc10.so", RTLD_LAZY | RTLD_NOLOAD);
    void* found = library ? dlsym(library, "_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE") : nullptr;
    if (found == nullptr) std::fprintf(stderr, "PyTorch's libc10.so takes no reports of blocks\n"), std::abort();
    return reinterpret_cast<Report*>(found);
}

// A block that is given back is reported with a negative size.
void reportMemoryUsageToProfiler(void* block, int64_t bytes, size_t allocated, size_t reserved, Device device) {
    static Report* const report = own_report();
    if (device.type == CUDA && bytes > 0) played::handed_out(block, static_cast<size_t>(bytes));
    report(block, bytes, allocated, reserved, device);
}

}  // namespace c10
