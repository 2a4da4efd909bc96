#include "device.h"

#include <sys/mman.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>

namespace played {
namespace {

constexpr size_t PAGE = 2 << 20;  // what the driver hands out device memory in

using Ranges = std::map<const char*, size_t>;  // start -> bytes
std::mutex guard;
Ranges device, reserved, written, host, registered;
std::map<size_t, std::set<char*>> vacant;  // addresses that were reserved once, by size
size_t used = 0;

size_t whole_pages(size_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

bool inside(const Ranges& ranges, const void* address, size_t bytes = 1) {
    const char* at = static_cast<const char*>(address);
    auto next = ranges.upper_bound(at);
    if (next == ranges.begin()) return false;
    --next;
    return at + bytes <= next->first + next->second;
}

// Forgets what was written between two addresses; the ends of a range that reaches beyond them stay known.
void forget(const char* start, const char* end) {
    auto range = written.lower_bound(start);
    if (range != written.begin()) --range;
    while (range != written.end() && range->first < end) {
        const char *first = range->first, *last = first + range->second;
        if (last <= start) {
            ++range;
            continue;
        }
        range = written.erase(range);
        if (first < start) written[first] = start - first;
        if (last > end) written[end] = last - end;
    }
}

void remember(void* address, size_t bytes) {
    const char* start = static_cast<const char*>(address);
    forget(start, start + bytes);
    written[start] = bytes;
}

char* mapped(void* start, size_t bytes) {
    void* found = mmap(start, bytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
    return found == MAP_FAILED ? nullptr : static_cast<char*>(found);
}

// Address space on a page's border, which takes no memory until it is written to. Each piece lies behind the
// one before it, so that what PyTorch's allocator chooses between equal blocks, by address, is the same every
// time.
char* address_space(size_t bytes) {
    static std::atomic<uintptr_t> next{0x300000000000};
    return mapped(reinterpret_cast<void*>(next.fetch_add(whole_pages(bytes))), bytes);
}

Gpu described() {
    Gpu gpu;
    gpu.name = setting("MEMPLAN_NOGPU_NAME");
    int capability = std::atoi(setting("MEMPLAN_NOGPU_CAPABILITY"));  // 90 is 9.0
    gpu.major = capability / 10;
    gpu.minor = capability % 10;
    gpu.kernels = std::atoi(setting("MEMPLAN_NOGPU_KERNELS"));
    gpu.multiprocessors = std::atoi(setting("MEMPLAN_NOGPU_MULTIPROCESSORS"));
    gpu.threads_per_multiprocessor = std::atoi(setting("MEMPLAN_NOGPU_THREADS"));
    gpu.memory_bytes = std::strtoull(setting("MEMPLAN_NOGPU_BYTES"), nullptr, 10);
    // Datasheets: the width of the memory by its kind, of which each clock moves two bits for each wire.
    switch (capability) {
        case 70: gpu.memory_bus_bits = 4096; break;
        case 80: case 90: gpu.memory_bus_bits = 5120; break;
        case 100: gpu.memory_bus_bits = 8192; break;
        default: gpu.memory_bus_bits = 384;
    }
    double bytes_per_s = std::atof(setting("MEMPLAN_NOGPU_BYTES_PER_S"));
    gpu.memory_clock_khz = static_cast<int>(bytes_per_s / (gpu.memory_bus_bits / 4) / 1000);
    // CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
    const size_t KiB = 1024;
    switch (capability) {
        case 70: gpu.shared_per_multiprocessor = 96 * KiB; break;
        case 75: gpu.shared_per_multiprocessor = 64 * KiB; break;
        case 80: gpu.shared_per_multiprocessor = 164 * KiB; break;
        case 86: case 89: case 120: gpu.shared_per_multiprocessor = 100 * KiB; break;
        default: gpu.shared_per_multiprocessor = 228 * KiB;
    }
    // A block may take all but 1 KiB from 8.0 on, all of it before.
    gpu.shared_per_block = gpu.shared_per_multiprocessor - (capability >= 80 ? KiB : 0);
    return gpu;
}

}  // namespace

const char* setting(const char* name) {
    const char* value = std::getenv(name);
    if (value == nullptr) {
        std::fprintf(stderr, "%s is not set: the played CUDA runtime is started by validate/nogpu\n", name);
        std::abort();
    }
    return value;
}

const Gpu& gpu() {
    static const Gpu known = described();
    return known;
}

bool take(size_t bytes) {
    std::lock_guard<std::mutex> locked(guard);
    if (used + bytes > gpu().memory_bytes) return false;
    used += bytes;
    return true;
}

void give_back(size_t bytes) {
    std::lock_guard<std::mutex> locked(guard);
    used -= bytes;
}

void* allocate(size_t bytes) {
    bytes = whole_pages(bytes);
    if (!take(bytes)) return nullptr;
    char* start = address_space(bytes);
    std::lock_guard<std::mutex> locked(guard);
    if (start != nullptr) device[start] = bytes;
    return start;
}

bool release(void* address) {
    std::lock_guard<std::mutex> locked(guard);
    char* start = static_cast<char*>(address);
    auto found = device.find(start);
    if (found == device.end()) return false;
    forget(start, start + found->second);
    munmap(start, found->second);
    used -= found->second;
    device.erase(found);
    return true;
}

size_t used_bytes() {
    std::lock_guard<std::mutex> locked(guard);
    return used;
}

bool on_device(const void* address) {
    std::lock_guard<std::mutex> locked(guard);
    return inside(device, address) || inside(reserved, address);
}

// An expandable segment reserves as many addresses as the GPU has bytes, and there are not enough of them for
// many: those that were given back are taken first.
void* reserve(size_t bytes) {
    std::lock_guard<std::mutex> locked(guard);
    auto& known = vacant[bytes];
    char* start = known.empty() ? address_space(bytes) : mapped(*known.begin(), bytes);
    if (!known.empty()) known.erase(known.begin());
    if (start != nullptr) reserved[start] = bytes;
    return start;
}

void unreserve(void* address, size_t bytes) {
    std::lock_guard<std::mutex> locked(guard);
    char* start = static_cast<char*>(address);
    forget(start, start + bytes);
    reserved.erase(start);
    munmap(start, bytes);
    vacant[bytes].insert(start);
}

void* allocate_on_host(size_t bytes) {
    bytes = whole_pages(bytes);
    char* start = address_space(bytes);
    std::lock_guard<std::mutex> locked(guard);
    if (start != nullptr) host[start] = bytes;
    return start;
}

bool release_on_host(void* address) {
    std::lock_guard<std::mutex> locked(guard);
    auto found = host.find(static_cast<char*>(address));
    if (found == host.end()) return false;
    munmap(address, found->second);
    host.erase(found);
    return true;
}

void lock_on_host(void* address, size_t bytes) {
    std::lock_guard<std::mutex> locked(guard);
    registered[static_cast<char*>(address)] = bytes;
}

bool unlock_on_host(void* address) {
    std::lock_guard<std::mutex> locked(guard);
    return registered.erase(static_cast<char*>(address)) > 0;
}

bool locked_on_host(const void* address) {
    std::lock_guard<std::mutex> locked(guard);
    return inside(host, address) || inside(registered, address);
}

void copy(void* to, const void* from, size_t bytes) {
    bool to_device = on_device(to), from_device = on_device(from);
    std::lock_guard<std::mutex> locked(guard);
    char* start = static_cast<char*>(to);
    bool known = !from_device || inside(written, from, bytes);
    if (!to_device && !from_device) {
        std::memmove(to, from, bytes);
    } else if (bytes <= SMALL && known) {
        std::memmove(to, from, bytes);
        if (to_device) remember(to, bytes);
    } else if (to_device) {
        forget(start, start + bytes);
    } else if (bytes <= SMALL) {
        std::memset(to, 0, bytes);
    }
}

void handed_out(void* block, size_t bytes) {
    std::lock_guard<std::mutex> locked(guard);
    char* start = static_cast<char*>(block);
    forget(start, start + bytes);
}

void set(void* to, int value, size_t bytes) {
    std::lock_guard<std::mutex> locked(guard);
    char* start = static_cast<char*>(to);
    if (bytes > SMALL) {
        forget(start, start + bytes);
        return;
    }
    std::memset(to, value, bytes);
    remember(to, bytes);
}

void* handle() {
    static std::atomic<uintptr_t> last{0x1000};
    return reinterpret_cast<void*>(last += 16);
}

}  // namespace played
