"""The allocations and frees of a step, from the profiler's events."""

import ctypes
from bisect import bisect_left
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import UntypedStorage
from torch._C._profiler import RecordScope, _ExperimentalConfig, _ExtraFields_Allocation, _ProfilerEvent
from torch.autograd import (
    ProfilerActivity,
    ProfilerConfig,
    ProfilerState,
    _disable_profiler,
    _enable_profiler,
    _prepare_profiler,
)

from memplan.snapshot import MemoryEvent

STEP = "memplan: step"
UPDATE = "memplan: update"


OTHER_THREADS = "other threads"
"""The path of events that only the running total shows."""


class Profile(Protocol):
    """Records the allocations and frees that happen while it is active."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def recorded(self, names: Container[str]) -> "Recorded":
        """What happened, when it is over: the allocations and the named regions."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What a profile recorded: the allocator's events, and the regions marked by `record_function`."""

    events: list[MemoryEvent]
    regions: dict[str, list[tuple[int, int]]]
    """Start and end (ns) of each region of a name, in order of time."""


def pointer_of(storage: UntypedStorage) -> int:
    """Where a storage's bytes are; of one without data, where PyTorch keeps the storage itself."""
    return int(storage._cdata if storage.device.type == "meta" else storage.data_ptr())


def count_all_threads() -> None:
    """Makes the allocator count from now on, on every thread, whether profiled or not.

    So the running total of a later profile is all that is alive; and the tensors whose last reference
    gloo's threads drop, outside any profile, do not count as alive for ever.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage").value = True


class MemoryProfile:
    """A profile of CPU allocations, each with the operations it happened in if `paths` are asked for.

    `torch.profiler.profile` records every operation, which makes a step take twice as long, and reading
    the profile as long as ten steps; the profiler below it records what is marked by `record_function` only.

    Source: torch.autograd.profiler.profile, `_prepare_trace`, `_start_trace` and `__exit__`.
    """

    def __init__(self, *, paths: bool) -> None:
        self.paths = paths
        self._config = ProfilerConfig(
            ProfilerState.KINETO, False, True, False, False, False, _ExperimentalConfig()
        )
        self._tree: list[_ProfilerEvent] = []

    def __enter__(self) -> Self:
        activities = {ProfilerActivity.CPU}
        scopes = set() if self.paths else {RecordScope.USER_SCOPE}
        _prepare_profiler(self._config, activities)
        _enable_profiler(self._config, activities, scopes)  # type: ignore[call-arg]
        return self

    def __exit__(self, *_: object) -> None:
        self._tree = list(_disable_profiler().experimental_event_tree())

    def events(self) -> Iterator[tuple[_ProfilerEvent, Any]]:
        """Everything that was recorded, in no order, with an allocation's fields; else None."""
        stack = list(self._tree)
        while stack:
            event = stack.pop()
            fields = event.typed[1]
            if isinstance(fields, _ExtraFields_Allocation):
                yield event, fields
            else:
                yield event, None
                stack.extend(event.children)

    def recorded(self, names: Container[str]) -> Recorded:
        """The allocations and the named regions."""
        found: list[MemoryEvent] = []
        regions: dict[str, list[tuple[int, int]]] = {}
        for event, fields in self.events():
            if fields is not None:
                found.append(_memory_event(event, fields, self.paths))
            elif event.name in names:
                regions.setdefault(event.name, []).append((event.start_time_ns, event.end_time_ns))
        found.sort(key=lambda event: event.time_ns)
        return Recorded(
            events=list(_with_other_threads(found)),
            regions={name: sorted(spans) for name, spans in regions.items()},
        )


def _with_other_threads(events: list[MemoryEvent]) -> Iterator[MemoryEvent]:
    total = events[0].total_bytes - events[0].n_bytes if events else 0
    for event in events:
        unseen = event.total_bytes - total - event.n_bytes
        if unseen:
            yield event._replace(n_bytes=unseen, pointer=0, total_bytes=total + unseen, path=OTHER_THREADS)
        yield event
        total = event.total_bytes


def during(events: list[MemoryEvent], span: tuple[int, int]) -> list[MemoryEvent]:
    """The events from the start to the end of a region."""
    times = [event.time_ns for event in events]
    return events[bisect_left(times, span[0]) : bisect_left(times, span[1])]


def held_at(events: list[MemoryEvent], time_ns: int) -> list[MemoryEvent]:
    """The allocations made, and not seen to be freed, before an instant."""
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


def _memory_event(event: _ProfilerEvent, fields: Any, paths: bool) -> MemoryEvent:
    return MemoryEvent(
        time_ns=event.start_time_ns,
        n_bytes=fields.alloc_size,
        pointer=fields.ptr,
        total_bytes=fields.total_allocated,
        path=_path(event.parent) if paths else "",
    )


def _path(event: _ProfilerEvent | None) -> str:
    names = []
    while event is not None:
        names.append(event.name)
        event = event.parent
    return " > ".join(reversed(names))
