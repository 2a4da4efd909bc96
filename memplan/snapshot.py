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
from collections.abc import Mapping, Sequence
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

WAY_OUT: Final = (
    "use a file that torch.cuda.memory._dump_snapshot wrote after "
    "torch.cuda.memory._record_memory_history(), switched on before the step."
)

FEWER: Final = "record fewer entries (max_entries of torch.cuda.memory._record_memory_history)"

PLAIN: Final = (
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.POP, pickle.POP_MARK),
    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.SHORT_BINUNICODE, pickle.BINUNICODE),
    *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.BINFLOAT),
    *(pickle.EMPTY_LIST, pickle.LIST, pickle.APPEND, pickle.APPENDS),
    *(pickle.EMPTY_DICT, pickle.DICT, pickle.SETITEM, pickle.SETITEMS),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
    *(pickle.MEMOIZE, pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET),
)
"""The opcodes of plain data."""

BROKEN: Final = (pickle.UnpicklingError, struct.error, EOFError, MemoryError)
"""What Python's reader raises for a pickle that was cut off or changed, beside the errors of any code."""

NAMES: Final = {opcode.code: opcode.name for opcode in opcodes}


class _Reader(pickle._Unpickler):
    """Python's own unpickler without the opcodes that make anything but plain data."""

    dispatch: ClassVar = {code[0]: pickle._Unpickler.dispatch[code[0]] for code in PLAIN}


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
    _, data = loaded(path)
    name = shown_path(path)
    try:
        traces: Sequence[Sequence[Mapping[str, Any]]] = data["device_traces"]
        device = max(range(len(traces)), key=lambda i: len(traces[i]))
        blocks = [
            block
            for segment in data["segments"]
            if segment.get("device", device) == device
            for block in _blocks(segment)
        ]
        snapshot = _snapshot(blocks, traces[device])
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


def _blocks(segment: Mapping[str, Any]) -> list[tuple[int, int, str]]:
    """Address, bytes asked for, and origin of a segment's blocks in use."""
    address = segment.get("address", 0)
    found = []
    for block in segment["blocks"]:
        if block["state"] == "active_allocated":
            n_bytes = block.get("requested_size", block["size"])
            found.append((block.get("address", address), n_bytes, _origin(block.get("frames", ()))))
        address += block["size"]
    return found


def _snapshot(at_end: Sequence[tuple[int, int, str]], trace: Sequence[Mapping[str, Any]]) -> Snapshot:
    """The trace as events; what it frees or leaves in use without having allocated it was held before."""
    entries = [entry for entry in trace if entry["action"] in ("alloc", "free_requested")]
    held: dict[int, Block] = {}
    born: dict[int, int] = {}
    sizes: list[int] = []
    for entry in entries:
        address, n_bytes = _count(entry["addr"]), _bytes(entry["size"])
        if entry["action"] == "alloc":
            born[address] = n_bytes
            sizes.append(n_bytes)
        else:
            if address not in born:
                held[address] = _held_block(address, n_bytes, "")
            sizes.append(-born.pop(address, n_bytes))
    for address, n_bytes, origin in at_end:
        if address not in born:
            held[_count(address)] = _held_block(address, _count(n_bytes), origin)
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
                path=_origin(entry.get("frames", ())),
            )
        )
    return Snapshot(held=tuple(held.values()), events=tuple(events))


def _held_block(address: int, n_bytes: int, origin: str) -> Block:
    return Block(n_bytes=n_bytes, pointer=address, born_ns=-1, path=origin)


def _count(value: object) -> int:
    return checked_count("an address", value, least=0, most=2**64)


def _bytes(value: object) -> int:
    return checked_count("a size", value, least=0, most=MOST_BYTES)


def _origin(frames: Sequence[Mapping[str, Any]]) -> str:
    """The calls that asked for a block, outermost first; whatever a file says there, it can be printed."""
    return printable(
        " > ".join(
            f"{frame['name']} ({Path(str(frame['filename'])).name}:{frame['line']})"
            for frame in reversed(frames)
        )
    )
