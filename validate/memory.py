"""Every allocation and free of a step, from the profiler's events."""

import ctypes
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _EventType, _ProfilerEvent
from torch.profiler import ProfilerActivity, profile

STEP = "memplan: step"
UPDATE = "memplan: update"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEvent:
    """One allocation (positive bytes) or free (negative) of the CPU allocator.

    `total_bytes` is what the allocator held just after it, by the allocator's own count; `path` the
    operations it happened in, outermost first. What threads outside the profile did between two events is
    one event of its own, with pointer 0.
    """

    time_ns: int
    n_bytes: int
    pointer: int
    total_bytes: int
    path: str


OTHER_THREADS = "other threads"
"""The path of events that only the running total shows."""


def count_all_threads() -> None:
    """Makes the allocator's running total include every thread.

    Gloo's threads drop the last reference to some tensors outside any profile; without this they would
    count as alive for ever.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage").value = True


def memory_profile() -> "profile":
    """A profiler of CPU allocations."""
    return profile(activities=[ProfilerActivity.CPU], profile_memory=True)


def memory_events(profiled: profile) -> list[MemoryEvent]:
    """All allocations and frees seen by a finished profiler, in order of time.

    A free of a block from before the profile has the bytes the allocator says, which may be none.
    """
    found = [_memory_event(event) for event in _events(profiled) if event.tag == _EventType.Allocation]
    return list(_with_other_threads(sorted(found, key=lambda event: event.time_ns)))


def _with_other_threads(events: list[MemoryEvent]) -> Iterator[MemoryEvent]:
    total = events[0].total_bytes - events[0].n_bytes if events else 0
    for event in events:
        unseen = event.total_bytes - total - event.n_bytes
        if unseen:
            yield replace(
                event, n_bytes=unseen, pointer=0, total_bytes=total + unseen, path=OTHER_THREADS
            )
        yield event
        total = event.total_bytes


def marked(profiled: profile, name: str) -> list[tuple[int, int]]:
    """Start and end (ns) of each region that `record_function` gave this name, in order of time."""
    return sorted((e.start_time_ns, e.end_time_ns) for e in _events(profiled) if e.name == name)


def during(events: list[MemoryEvent], span: tuple[int, int]) -> list[MemoryEvent]:
    """The events from the start to the end of a region."""
    times = [event.time_ns for event in events]
    return events[bisect_left(times, span[0]) : bisect_left(times, span[1])]


def held_at(events: list[MemoryEvent], time_ns: int) -> list[MemoryEvent]:
    """The allocations not seen to be freed before an instant."""
    held: dict[int, MemoryEvent] = {}
    for event in events:
        if event.time_ns >= time_ns:
            break
        if event.n_bytes > 0:
            held[event.pointer] = event
        else:
            held.pop(event.pointer, None)
    held.pop(0, None)
    return list(held.values())


def _events(profiled: profile) -> Iterator[_ProfilerEvent]:
    inner: Any = profiled.profiler
    stack: list[_ProfilerEvent] = list(inner.kineto_results.experimental_event_tree())
    while stack:
        event = stack.pop()
        yield event
        stack.extend(event.children)


def _memory_event(event: _ProfilerEvent) -> MemoryEvent:
    fields: Any = event.typed[1]
    return MemoryEvent(
        time_ns=event.start_time_ns,
        n_bytes=fields.alloc_size,
        pointer=fields.ptr,
        total_bytes=fields.total_allocated,
        path=" > ".join(_path(event.parent)),
    )


def _path(event: _ProfilerEvent | None) -> Iterable[str]:
    names = []
    while event is not None:
        names.append(event.name)
        event = event.parent
    return reversed(names)
