"""Every allocation and free of a step, from the profiler's events."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

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


def memory_profile(*, stacks: bool = False) -> "profile":
    """A profiler of CPU allocations; with `stacks`, paths name Python modules too."""
    return profile(activities=[ProfilerActivity.CPU], profile_memory=True, with_stack=False)


def memory_events(profiled: profile) -> list[MemoryEvent]:
    """All allocations and frees seen by a finished profiler, in order of time."""
    found = [_memory_event(event) for event in _events(profiled) if event.tag == _EventType.Allocation]
    return sorted(found, key=lambda event: event.time_ns)


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
