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

    `total_bytes` is what the allocator held just after it, `path` the operations it happened in, outermost
    first, `thread` the operating system's id of the thread.
    """

    time_ns: int
    n_bytes: int
    pointer: int
    total_bytes: int
    thread: int
    path: str


def count_all_threads() -> None:
    """Makes the allocator's running total include what threads outside the profile free.

    Gloo's threads drop the last reference to some tensors; the profiler alone would count those as alive
    for ever.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage").value = True


def memory_profile() -> "profile":
    """A profiler of CPU allocations."""
    return profile(activities=[ProfilerActivity.CPU], profile_memory=True)


def memory_events(profiled: profile) -> list[MemoryEvent]:
    """All allocations and frees seen by a finished profiler, in order of time."""
    found, collective_ends = [], []
    for event in _events(profiled):
        if event.tag == _EventType.Allocation:
            found.append(_memory_event(event))
        elif event.name.startswith("gloo:"):
            collective_ends.append(event.end_time_ns)
    found.sort(key=lambda event: event.time_ns)
    return _summed(_with_lost_frees(found, sorted(collective_ends)))


def _with_lost_frees(events: list[MemoryEvent], collective_ends: list[int]) -> list[MemoryEvent]:
    """The events with the frees that the profiler cannot see added.

    A gloo worker thread sometimes drops the last reference to an operand, just after the collective, where
    profiling is off. Such a block shows itself by its address being handed out again, or by being a
    collective's own scratch that is never freed. Its free is put at the end of the first collective that
    ended after the block was made.
    """
    held: dict[int, MemoryEvent] = {}
    lost = []
    for event in events:
        if event.n_bytes < 0:
            held.pop(event.pointer, None)
        else:
            if event.pointer in held:
                lost.append(held[event.pointer])
            held[event.pointer] = event
    lost += [event for event in held.values() if "c10d::" in event.path or "gloo:" in event.path]
    frees = []
    for event in lost:
        at = bisect_left(collective_ends, event.time_ns)
        if at < len(collective_ends):
            path = f"{event.path} > freed by a worker thread"
            frees.append(replace(event, time_ns=collective_ends[at], n_bytes=-event.n_bytes, path=path))
    return sorted([*events, *frees], key=lambda event: event.time_ns)


def _summed(events: list[MemoryEvent]) -> list[MemoryEvent]:
    """The events with their running total; a free of a block never seen allocated counts for nothing."""
    held: dict[int, int] = {}
    total = 0
    summed = []
    for event in events:
        n_bytes = event.n_bytes if event.n_bytes > 0 else -held.pop(event.pointer, 0)
        if n_bytes > 0:
            held[event.pointer] = n_bytes
        total += n_bytes
        summed.append(replace(event, n_bytes=n_bytes, total_bytes=total))
    return summed


def marked(profiled: profile, name: str) -> tuple[int, int]:
    """Start and end (ns) of the only region that `record_function` gave this name."""
    spans = [(e.start_time_ns, e.end_time_ns) for e in _events(profiled) if e.name == name]
    if len(spans) != 1:
        raise RuntimeError(f"{len(spans)} regions named {name!r} in the profile; there must be one")
    return spans[0]


def during(events: list[MemoryEvent], span: tuple[int, int]) -> list[MemoryEvent]:
    """The events from the start to the end of a region."""
    times = [event.time_ns for event in events]
    return events[bisect_left(times, span[0]) : bisect_left(times, span[1])]


def held_at(events: list[MemoryEvent], time_ns: int) -> list[MemoryEvent]:
    """The allocations made and not freed before an instant."""
    held: dict[int, MemoryEvent] = {}
    for event in events:
        if event.time_ns >= time_ns:
            break
        if event.n_bytes > 0:
            held[event.pointer] = event
        else:
            held.pop(event.pointer, None)
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
        thread=event.start_tid,
        path=" > ".join(_path(event.parent)),
    )


def _path(event: _ProfilerEvent | None) -> Iterable[str]:
    names = []
    while event is not None:
        names.append(event.name)
        event = event.parent
    return reversed(names)
