#include "streams.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>

#include "device.h"

namespace played {
namespace {

// Of each stream, how many of the events that were recorded on it.
using Reached = std::map<const void*, uint64_t>;

struct Event {
    const void* stream = nullptr;
    Reached reached;
    uint64_t number = 0;  // among the events of all streams
};

// These outlive all other threads, which may ask while the process ends.
std::mutex& guard = *new std::mutex;
auto& streams = *new std::map<const void*, Reached>;  // what is over before a stream does what it is asked next
Reached& over = *new Reached;                         // what the host knows to be over
uint64_t n_recorded = 0, waited_for = 0;

const Event& known(const void* event) { return *static_cast<const Event*>(event); }

void join(Reached& into, const Reached& other) {
    for (const auto& [stream, n] : other) into[stream] = std::max(into[stream], n);
}

}  // namespace

void* new_event() { return new Event{}; }

void destroy_event(void* event) {
    std::lock_guard<std::mutex> locked(guard);
    delete static_cast<Event*>(event);
}

void record(void* event, const void* stream) {
    std::lock_guard<std::mutex> locked(guard);
    Reached& reached = streams[stream];
    ++reached[stream];
    *static_cast<Event*>(event) = Event{stream, reached, ++n_recorded};
}

void stream_waits(const void* stream, const void* event) {
    std::lock_guard<std::mutex> locked(guard);
    join(streams[stream], known(event).reached);
}

void host_waits_for_event(const void* event) {
    std::lock_guard<std::mutex> locked(guard);
    join(over, known(event).reached);
}

void host_waits_for_stream(const void* stream) {
    std::lock_guard<std::mutex> locked(guard);
    join(over, streams[stream]);
}

void host_waits_for_device() {
    std::lock_guard<std::mutex> locked(guard);
    for (const auto& [stream, reached] : streams) join(over, reached);
    waited_for = n_recorded;
}

bool is_over(const void* event) {
    static const bool late = std::strcmp(setting("MEMPLAN_NOGPU_RECORD_STREAM"), "late") == 0;
    if (!late) return true;
    std::lock_guard<std::mutex> locked(guard);
    const Event& asked = known(event);
    auto n = asked.reached.find(asked.stream);
    return n == asked.reached.end() || n->second <= over[asked.stream];
}

bool is_over_for_watchdog(const void* event) {
    std::lock_guard<std::mutex> locked(guard);
    return known(event).number <= waited_for;
}

}  // namespace played
