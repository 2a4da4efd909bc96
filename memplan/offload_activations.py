"""What autograd saves, kept on the host by TRL's `OffloadActivations`, which copies on a stream of its own.

Each tensor that a forward pass saves has a number. One of `LEAST_BYTES` or more that is no parameter goes to
the host; the GPU keeps it too until `MOST_STASHED` numbers later, or until the backward pass reads one. A
tensor that is there already stays on the GPU. One that comes back lives until another operation has read its
own.

Source: trl.models.activation_offloading:OffloadActivations (TRL 1.16).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from memplan.mesh import HOST
from memplan.record import COMPUTE, Collective, WaitStream
from memplan.shapes import Parameter, Role

if TYPE_CHECKING:
    from memplan.tape import Node, Tape, Tensor

LEAST_BYTES: Final = 1024
"""The smallest tensor that is copied (`min_offload_size`)."""

MOST_STASHED: Final = 5
"""The numbers after which the GPU drops a tensor that was copied (`max_fwd_stash_size`)."""

STREAM: Final = "offload"
"""The stream of the copies."""


class OffloadActivations:
    """The tensors of one micro-batch that are on the host, on their way there, or back."""

    def __init__(self, tape: "Tape") -> None:
        self.tape = tape
        self.is_active = True
        self._n = 0
        self._numbers: dict[Tensor, int] = {}
        self._stashed: dict[int, Tensor] = {}
        self._known: dict[int, int] = {}
        """The last number of each storage that is stashed or was saved again, by its identity."""
        self._back: dict[int, Tensor] = {}
        self._dropped: list[int] | None = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A block in which nothing is copied, as TRL has it around the output layer (`NoOpManager`)."""
        before, self.is_active = self.is_active, False
        yield
        self.is_active = before

    def packed(self, x: "Tensor") -> "Tensor":
        """What autograd keeps of a tensor that it saves: the tensor, or one without bytes on the device."""
        if not self.is_active:
            return x
        self._n += 1
        storage = x.storage
        if id(storage) in self._known:
            self._known[id(storage)] = self._n
            return x
        if x.n_bytes < LEAST_BYTES or (storage is None and isinstance(x.node, Parameter)):
            return x
        stashed = x.detach()
        if storage is not None and storage.buffer.n_bytes > x.n_bytes:  # a view that begins later
            stashed = self.tape.new("copy of a view", x.shape, x.dtype)
        self._drop_until(self._n - MOST_STASHED)
        self._copied("to the host", x.n_bytes, WaitStream(STREAM, COMPUTE))
        kept = type(x)(self.tape, x.shape, x.dtype, None, x.node, head_major=x.head_major)
        self._numbers[kept] = self._n
        if storage is not None:
            self._stashed[self._n], self._known[id(storage)] = stashed, self._n
        return kept

    def stashes_older(self, x: "Tensor") -> None:
        """Stash the inputs of as many blocks before the one that is called with x."""
        for _ in range(MOST_STASHED):
            self._n += 1
            self._stashed[self._n] = self.tape.another_like(x)

    def _drop_until(self, last: int) -> None:
        for number in [number for number in self._stashed if number <= last]:
            self._drop(number)

    def _drop(self, number: int) -> None:
        x = self._stashed.pop(number)
        if self._known.get(id(x.storage)) == number:
            del self._known[id(x.storage)]

    def unpacked(self, kept: "Tensor") -> "Tensor":
        """What an operation of the backward pass reads of what autograd keeps."""
        if kept not in self._numbers:
            return kept
        number, tape = self._numbers.pop(kept), self.tape
        if self._dropped is None:
            self._dropped = [*self._back]
        if number in self._stashed:
            return self._stashed[number]
        with tape.by_products():
            found = tape.new("from the host", kept.shape, kept.dtype, kept.node, head_major=kept.head_major)
        if found.storage is not None:
            found.storage.buffer.role = Role.FROM_HOST
        self._copied("from the host", found.n_bytes)
        tape.events.append(WaitStream(COMPUTE, STREAM))
        self._back[number] = found.detach()
        return found

    def after(self, nodes: "Sequence[Node]") -> None:
        """An operation has read what it had saved; `nodes` are its region's, which is computed again."""
        if self._dropped is None:
            return
        again = [id(x.storage) for node in nodes for x in node.saved or ()]
        for number in [n for n, x in self._back.items() if id(x.storage) in again]:
            del self._back[number]
        self._drop_until(self._n)
        for number in self._dropped:
            self._back.pop(number, None)
        self._dropped = None

    def end(self) -> None:
        """The backward pass is over."""
        self._back.clear()

    def _copied(self, where: str, n_bytes: int, *before: WaitStream) -> None:
        self.tape.events += before
        what = f"activations {where}"
        self.tape.events.append(
            Collective(kind="copy", axis=HOST, what=what, payload_bytes=n_bytes, stream=STREAM)
        )
