"""The lifetimes of storages: what an allocator would allocate and free."""

import weakref
from collections.abc import Container
from typing import Self, cast

from torch import Tensor, UntypedStorage

from memplan.snapshot import MemoryEvent
from validate.memory import Recorded, pointer_of


class _Watch(weakref.ref[UntypedStorage]):
    """Tells when a storage is gone, and remembers which it was."""

    __slots__ = ("n_bytes", "pointer")

    pointer: int
    n_bytes: int


class Lifetimes:
    """The allocations and frees of all storages seen, and the marked regions.

    An instant (`time_ns` of an event) is the number of what happened before: nothing here takes time. With
    `paths` an event says in which regions and operation it happened.
    """

    def __init__(self, *, paths: bool) -> None:
        self.paths = paths
        self.operation: object = ""
        """What runs now."""
        self.events: list[MemoryEvent] = []
        self.regions: list[tuple[str, int, int]] = []
        """Name, start and end of those that have ended."""
        self._entered: list[tuple[str, int]] = []
        self._alive: dict[int, _Watch] = {}
        self._total_bytes = 0
        self._now = 0

    def profile(self) -> "LifetimeProfile":
        """What happens from its start to its end."""
        return LifetimeProfile(self)

    def seen(self, tensor: Tensor) -> None:
        """The tensor is alive; its storage may be new."""
        storage = tensor.untyped_storage()
        pointer = pointer_of(storage)
        if pointer not in self._alive:
            watch = _Watch(storage, self._gone)
            watch.pointer, watch.n_bytes = pointer, storage.nbytes()
            self._alive[pointer] = watch
            self._happened(pointer, watch.n_bytes)

    def resized(self, storage: UntypedStorage) -> None:
        """A storage has been freed without its tensors, or filled again, as FSDP2 does."""
        watch = self._alive.get(pointer_of(storage))
        n_bytes = storage.nbytes()
        if watch is None or n_bytes == watch.n_bytes:
            return
        if watch.n_bytes and n_bytes:
            raise NotImplementedError(f"a storage of {watch.n_bytes} bytes is resized to {n_bytes}.")
        self._happened(watch.pointer, n_bytes - watch.n_bytes)
        watch.n_bytes = n_bytes

    def entered(self, region: str) -> None:
        """A region begins (`torch.profiler.record_function`)."""
        self._now += 1
        self._entered.append((region, self._now))

    def left(self) -> None:
        """The innermost region ends."""
        self._now += 1
        region, start = self._entered.pop()
        self.regions.append((region, start, self._now))

    def _gone(self, reference: "weakref.ref[UntypedStorage]") -> None:
        watch = cast(_Watch, reference)
        del self._alive[watch.pointer]
        self._happened(watch.pointer, -watch.n_bytes)

    def _happened(self, pointer: int, n_bytes: int) -> None:
        if not n_bytes:
            return
        self._now += 1
        self._total_bytes += n_bytes
        path = " > ".join([*(name for name, _ in self._entered), str(self.operation)]) if self.paths else ""
        self.events.append(MemoryEvent(self._now, n_bytes, pointer, self._total_bytes, path))


class LifetimeProfile:
    """What happened to storages while it was active; what `validate.memory.MemoryProfile` is to real ones."""

    def __init__(self, lifetimes: Lifetimes) -> None:
        self.lifetimes = lifetimes
        self._start = self._end = 0

    def __enter__(self) -> Self:
        self._start = len(self.lifetimes.events)
        return self

    def __exit__(self, *_: object) -> None:
        self._end = len(self.lifetimes.events)

    def recorded(self, names: Container[str]) -> Recorded:
        """The allocations and the named regions."""
        regions: dict[str, list[tuple[int, int]]] = {}
        for name, start, end in sorted(self.lifetimes.regions, key=lambda region: region[1]):
            if name in names:
                regions.setdefault(name, []).append((start, end))
        return Recorded(events=self.lifetimes.events[self._start : self._end], regions=regions)
