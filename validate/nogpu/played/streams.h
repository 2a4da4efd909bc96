// Streams and events: what was asked of each stream, in which order, and what of it is over.
#pragma once

namespace played {

void* new_event();
void destroy_event(void* event);

// The event stands for all that its stream was asked to do so far, and for what that had to wait for.
void record(void* event, const void* stream);

// What a stream is asked to do next waits for an event.
void stream_waits(const void* stream, const void* event);

// The host waits: what it has waited for is over.
void host_waits_for_event(const void* event);
void host_waits_for_stream(const void* stream);
void host_waits_for_device();

// Whether all that an event stands for is over: at once (early), or once the host has waited for it (late), by
// `MEMPLAN_NOGPU_RECORD_STREAM`. A GPU's work ends somewhere between the two.
bool is_over(const void* event);

// The same for NCCL's watchdog: once the host has waited for the whole device.
bool is_over_for_watchdog(const void* event);

}  // namespace played
