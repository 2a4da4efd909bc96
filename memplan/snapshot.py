"""Memory snapshots of CUDA's caching allocator, read without executing anything.

`torch.cuda.memory._dump_snapshot` writes a pickle, and unpickling may run whatever the file says. This reader
knows the opcodes of plain data only (numbers, texts, lists, dicts, tuples, references to them); it has none
that imports, calls or builds an object, so that a hostile file can at most be refused.

Source: the structure of a snapshot is documented with `torch.cuda.memory._snapshot`; sizes of its trace are
those that were asked for, before the allocator rounds them up.
"""

import io
import os
import pickle
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickletools import opcodes
from typing import Any, ClassVar, Final, NamedTuple

from memplan.checks import LARGEST_BYTES as MOST_BYTES
from memplan.checks import checked_count
from memplan.errors import InvalidValue, MemplanError, shown_value
from memplan.files import file_bytes, of_file, shown_path
from memplan.text_tables import printable

LARGEST_BYTES: Final = 512 * 2**20
"""A larger file is refused: reading takes a second for some MiB, and many times their bytes of memory."""

LEAST_BYTES: Final = 12
"""The bytes of the smallest entry or block: a dict of two values, its keys by reference."""

MOST_OF_A_NAME: Final = 80
"""Characters kept of the name of a function, and of a file."""

WAY_OUT: Final = (
    "use a file that torch.cuda.memory._dump_snapshot wrote after "
    "torch.cuda.memory._record_memory_history(), switched on before the step."
)

FEWER: Final = "record fewer entries (max_entries of torch.cuda.memory._record_memory_history)"

PLAIN: Final = (
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.POP, pickle.POP_MARK),
    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.SHORT_BINUNICODE, pickle.BINUNICODE),
    *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.BINFLOAT),
    *(pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS),
    *(pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
    *(pickle.MEMOIZE, pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET),
)
"""The opcodes of plain data."""

BROKEN: Final = (pickle.UnpicklingError, struct.error, EOFError, MemoryError)
"""What Python's reader raises for a pickle that was cut off or changed, beside the errors of any code."""

NAMES: Final = {opcode.code: opcode.name for opcode in opcodes}


class _Reader(pickle._Unpickler):
    """Python's own unpickler without the opcodes that make anything but plain data, whose keys are short."""

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    def load_setitem(self) -> None:
        value = self.stack.pop()
        key = self.stack.pop()
        self.stack[-1][_key(key)] = value

    def load_setitems(self) -> None:
        items = self.pop_mark()
        self.stack[-1].update(zip(map(_key, items[::2]), items[1::2], strict=True))

    dispatch: ClassVar[dict[int, Any]] = {code[0]: pickle._Unpickler.dispatch[code[0]] for code in PLAIN} | {
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
    }


def _key(value: object) -> object:
    """A key of a dict: a text or a number of 64 bits, as hashes of others can take any time."""
    if isinstance(value, str) or (isinstance(value, int) and value.bit_length() <= 64):
        return value
    raise TypeError("a key of a dict is neither a text nor a number of 64 bits")


class MemoryEvent(NamedTuple):
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A block that the allocator holds: its allocation's index and the operations around it, outermost first.

    `kind` is "weights" or "optimizer" if its address is known to hold such a state, "" if it is known not to,
    None if nothing is known.
    """

    n_bytes: int
    pointer: int
    born_ns: int
    path: str
    kind: str | None = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One device's trace: the blocks held when it begins, and its allocations and frees since."""

    held: tuple[Block, ...]
    events: tuple[MemoryEvent, ...]


def read_snapshot(path: Path) -> Snapshot:
    """The device of a snapshot that allocated most often.

    Raises:
        InvalidValue: a file that is too large, no plain data, or no snapshot with a trace.
    """
    content, data = loaded(path)
    name = shown_path(path)
    try:
        traces: Sequence[Sequence[Mapping[str, Any]]] = data["device_traces"]
        device = max(range(len(traces)), key=lambda i: len(traces[i]))
        segments = [one for one in data["segments"] if one.get("device", device) == device]
        n_reached = len(traces[device]) + sum(len(segment["blocks"]) for segment in segments)
        if n_reached * LEAST_BYTES > len(content):
            raise ValueError(f"{n_reached} blocks and entries, some of them by reference to one place")
        origins = _Origins()
        blocks = [block for segment in segments for block in _blocks(segment, origins)]
        snapshot = _snapshot(blocks, traces[device], origins)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise InvalidValue(f"{name} is no memory snapshot ({shown_value(error, 200)}); {WAY_OUT}") from None
    if not snapshot.events:
        raise InvalidValue(f"{name} has no trace of allocations; {WAY_OUT}")
    return snapshot


def loaded(path: str | os.PathLike[str]) -> tuple[bytes, Any]:
    """The content of a snapshot's file, and the plain data that it holds.

    Raises:
        InvalidValue: a file that is too large, or no plain data.
    """
    try:
        content = file_bytes(path, most_bytes=LARGEST_BYTES, what="memory snapshot", smaller=FEWER)
    except MemplanError as error:
        raise of_file(path, error) from None
    return content, plain_data(content, shown_path(path))


def plain_data(content: bytes, name: str) -> Any:
    """What a pickle holds if it is plain data.

    Raises:
        InvalidValue: if it is anything else, or broken.
    """
    try:
        return _Reader(io.BytesIO(content)).load()
    except KeyError as error:
        code = error.args[0]
        name_of_code = NAMES.get(chr(code)) if isinstance(code, int) else None
        said = f"{name_of_code} makes more than plain data" if name_of_code else "it is no pickle"
        raise InvalidValue(f"{name} is not read: {said}; {WAY_OUT}") from None
    except (*BROKEN, AttributeError, IndexError, TypeError, ValueError) as error:
        raise InvalidValue(f"{name} is no whole pickle ({error}); {WAY_OUT}") from None


class _Origins:
    """The calls that asked for a block, outermost first, as a text that can be printed.

    Frames that many blocks share by reference are made a text once.
    """

    def __init__(self) -> None:
        self._known: dict[int, str] = {}

    def __call__(self, block: Mapping[str, Any]) -> str:
        frames = block.get("frames", ())
        if id(frames) not in self._known:
            self._known[id(frames)] = printable(" > ".join(map(_frame, reversed(frames))))
        return self._known[id(frames)]


def _frame(frame: Mapping[str, Any]) -> str:
    name, file, line = frame["name"], frame["filename"], frame["line"]
    if not (isinstance(name, str) and isinstance(file, str) and isinstance(line, int)):
        raise TypeError("a frame's name, filename and line are not two texts and a number")
    return f"{name[:MOST_OF_A_NAME]} ({Path(file[-MOST_OF_A_NAME:]).name}:{line})"


def _blocks(segment: Mapping[str, Any], origins: _Origins) -> list[tuple[int, int, str]]:
    """Address, bytes asked for, and origin of a segment's blocks in use."""
    address = segment.get("address", 0)
    found = []
    for block in segment["blocks"]:
        n_bytes = _bytes(block["size"])
        if block["state"] == "active_allocated":
            own, asked = block.get("address", address), block.get("requested_size", n_bytes)
            found.append((_address(own), _bytes(asked), origins(block)))
        address = _address(address) + n_bytes
    return found


def _snapshot(
    at_end: Sequence[tuple[int, int, str]], trace: Sequence[Mapping[str, Any]], origins: _Origins
) -> Snapshot:
    """The trace as events; what it frees or leaves in use without having allocated it was held before."""
    entries = [entry for entry in trace if entry["action"] in ("alloc", "free_requested")]
    held: dict[int, Block] = {}
    born: dict[int, int] = {}
    sizes: list[int] = []
    for entry in entries:
        address, n_bytes = _address(entry["addr"], least=1), _bytes(entry["size"])
        if entry["action"] == "alloc":
            born[address] = n_bytes
            sizes.append(n_bytes)
        else:
            if address not in born:
                held[address] = _held_block(address, n_bytes, "")
            sizes.append(-born.pop(address, n_bytes))
    for address, n_bytes, origin in at_end:
        if address not in born:
            held[address] = _held_block(address, n_bytes, origin)
    total = sum(block.n_bytes for block in held.values())
    events = []
    for i, (entry, n_bytes) in enumerate(zip(entries, sizes, strict=True)):
        total += n_bytes
        events.append(
            MemoryEvent(
                time_ns=i,
                n_bytes=n_bytes,
                pointer=entry["addr"],
                total_bytes=total,
                path=origins(entry),
            )
        )
    return Snapshot(held=tuple(held.values()), events=tuple(events))


def _held_block(address: int, n_bytes: int, origin: str) -> Block:
    return Block(n_bytes=n_bytes, pointer=address, born_ns=-1, path=origin)


def _address(value: object, least: int = 0) -> int:
    return checked_count("an address", value, least=least, most=2**64)


def _bytes(value: object) -> int:
    return checked_count("a size", value, least=0, most=MOST_BYTES)
