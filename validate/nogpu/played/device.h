// The GPU that is not there: what it is, and its memory, which is address space without pages.
#pragma once
#include <cstddef>
#include <string>

namespace played {

// What is taken to be one for every GPU.
constexpr int WARP = 32, MOST_THREADS = 1024, REGISTERS = 65536, MOST_GRID = 2147483647, MOST_BLOCKS = 32;
constexpr int CLOCK_KHZ = 1000000, L2_BYTES = 50 << 20;

// What the environment of the process says of the GPU (`MEMPLAN_NOGPU_*`, set by validate/nogpu).
struct Gpu {
    std::string name;
    int major, minor;             // compute capability
    int kernels;                  // of which capability PyTorch's kernels would run: 86 is 8.6
    int multiprocessors;
    size_t memory_bytes;
    int memory_bus_bits, memory_clock_khz;
    int threads_per_multiprocessor;
    size_t shared_per_multiprocessor, shared_per_block;
};
const Gpu& gpu();

// A variable of that environment; without it the process ends.
const char* setting(const char* name);

// Device memory: `allocate` returns nullptr when the GPU's memory ends.
void* allocate(size_t bytes);
bool release(void* address);
size_t used_bytes();
bool on_device(const void* address);

// Virtual memory management: addresses are reserved first, physical memory is taken from the GPU by itself.
void* reserve(size_t bytes);
void unreserve(void* address, size_t bytes);
bool take(size_t bytes);
void give_back(size_t bytes);

// Memory of the host that is locked to its pages, allocated so or locked later, which PyTorch asks about.
void* allocate_on_host(size_t bytes);
bool release_on_host(void* address);
void lock_on_host(void* address, size_t bytes);
bool unlock_on_host(void* address);
bool locked_on_host(const void* address);

// Copies really happen up to `SMALL`: shapes, counters, pickled objects. Device bytes that nothing was copied to
// since PyTorch's allocator handed their block out are read as zeros, for kernels do nothing. So no value depends
// on what was at an address before.
constexpr size_t SMALL = 1 << 20;
void copy(void* to, const void* from, size_t bytes);
void set(void* to, int value, size_t bytes);
void handed_out(void* block, size_t bytes);

// A new handle: of a stream, an event, a library.
void* handle();

}  // namespace played
