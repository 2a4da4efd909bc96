"""What was alive on a GPU when memory ran out, read from a memory snapshot.

A snapshot (`torch.cuda.memory._dump_snapshot`) has the allocator's blocks at its end, and the trace of its
allocations and frees. The instant at which an allocation failed is found by undoing what came after it.

Source: torch.cuda.memory._snapshot documents the structure; c10/cuda/CUDACachingAllocator.cpp,
`record_trace`.
"""

import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple, final

from memplan.checks import checked_count
from memplan.errors import InvalidValue, shown_value
from memplan.files import shown_path
from memplan.snapshot import WAY_OUT, loaded
from memplan.text_tables import html_text, printable, text_table, wrapped
from memplan.units import binary_unit, human_bytes, scaled
from memplan.version import versioned

ROUNDED: Final = 512
"""The allocator rounds a block's bytes up to a multiple of this at least."""

LEAST_BYTES: Final = 12
"""The bytes that an entry or a block takes in a file at least."""

STEP: Final = "Optimizer.step#"
"""How the annotations of torch's optimizers begin."""

LIBRARIES: Final = ("/site-packages/", "/dist-packages/", "/lib/python3", "/torch/")
"""Folders of code that is not the user's own."""

MOST_OF_A_NAME: Final = 60
"""Characters that are shown of the name of a function, and of a file."""

MOST_PLACES: Final = 10
"""Lines of code that the text shows."""

Span = tuple[int, int]
"""Addresses from the first one to the one before the last one."""

WHAT: Final = {
    "weights": "weights",
    "optimizer": "optimizer state",
    "update": "optimizer step",
    "gathered": "FSDP: gathered weights, gradient buffers",
    "recomputed": "recomputed in backward",
    "backward": "backward pass: gradients and temporaries",
    "forward": "forward pass: activations",
    "other": "calls outside modules: losses, inputs",
    "before": "allocated before recording began",
    "unknown": "no stack was recorded",
}
"""What a block is, by the calls that it was allocated in."""

ADVICE: Final = {
    "weights": "Weights are the largest part: shard them over more GPUs (FSDP2: --zero 3; --tp, --pp), or "
    "keep them on the host (--offload).",
    "optimizer": "The optimizer's state is the largest part: shard it (--zero 1 or more), keep it on the "
    "host (--offload), or use an optimizer with less (--optimizer sgd-momentum).",
    "update": "The optimizer's step is the largest part: --optimizer-impl fused needs no temporary copies.",
    "gathered": "What FSDP gathers is the largest part: gather less at once, a unit for each block "
    "(--fsdp-units block, --fsdp-blocks 1).",
    "recomputed": "What is recomputed is the largest part: recompute one block at a time, or use a smaller "
    "micro-batch (--micro-batch).",
    "backward": "The backward pass is the largest part, gradients among it: shard gradients (--zero 2 or 3), "
    "free them after each step (zero_grad(set_to_none=True)), or use a smaller micro-batch (--micro-batch).",
    "forward": "Activations are the largest part: use a smaller micro-batch with gradient accumulation "
    "(--micro-batch), recompute them in backward (torch.utils.checkpoint; --recompute full), or use a "
    "shorter sequence (--seq-len).",
    "other": "Calls outside modules are the largest part: delete tensors that are no longer needed, and add "
    "up losses as loss.item().",
    "before": "Most was allocated before recording began: call torch.cuda.memory._record_memory_history() "
    "before the model is made, to see what it is.",
    "unknown": "Record with stacks to see what this is: torch.cuda.memory._record_memory_history() before "
    "the model is made.",
}
"""What to do about the largest part."""

EXPANDABLE: Final = (
    "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (memplan: --alloc-conf expandable_segments:True)."
)

JOINED: Final = "Segments can grow already (expandable_segments): allocate the largest tensors first."
"""What to do about fragmentation, by whether the allocator's segments can grow."""

LOSS: Final = (
    "The loss holds {} of it: compute it in pieces of the sequence (--loss-chunks 8), so that the logits are "
    "never whole in float32."
)

LOSSES: Final = ("cross_entropy", "nll_loss", "log_softmax")
"""Functions of torch that are called to compute a loss."""


class Origin(NamedTuple):
    """Where a block was allocated: a key of `WHAT`, and the line of the user's code."""

    what: str
    where: str


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Blocks of one origin that were alive: their bytes, as the allocator rounds them, and their number."""

    what: str
    where: str
    n_bytes: int
    n_blocks: int


@final
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class OomReport:
    """What was alive when an allocation failed, or, if none did, when most was.

    Attributes:
        asked_bytes: bytes of the allocation that failed; None: none failed.
        asked_in: where it was asked for.
        n_steps: optimizer steps that had ended since recording began.
        held: the blocks alive, by where they were allocated, largest first.
        reserved_bytes: bytes of the allocator's segments.
        largest_free_bytes: the largest piece of them that is free.
        device_free_bytes: what the GPU had free; None: not known.
        expandable: whether the allocator's segments can grow (`expandable_segments`).
    """

    asked_bytes: int | None
    asked_in: str
    n_steps: int
    held: tuple[Held, ...]
    reserved_bytes: int
    largest_free_bytes: int
    device_free_bytes: int | None
    expandable: bool

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all blocks alive."""
        return sum(each.n_bytes for each in self.held)

    @property
    def free_bytes(self) -> int:
        """Bytes that the allocator had reserved and not allocated."""
        return self.reserved_bytes - self.allocated_bytes

    @property
    def is_fragmented(self) -> bool:
        """Whether enough was reserved and free, but in pieces that were too small."""
        return self.asked_bytes is not None and self.largest_free_bytes < self.asked_bytes <= self.free_bytes

    @property
    def by_what(self) -> dict[str, int]:
        """Bytes alive of each key of `WHAT`, the most first."""
        n_bytes: Counter[str] = Counter()
        for each in self.held:
            n_bytes[each.what] += each.n_bytes
        return dict(n_bytes.most_common())

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as `--json` prints them."""
        figures = ("allocated_bytes", "free_bytes", "is_fragmented", "by_what")
        said = {**asdict(self), **{name: getattr(self, name) for name in figures}}
        return versioned(said | {"advice": list(_advice(self))})

    def __str__(self) -> str:
        return oom_text(self)

    def __repr__(self) -> str:
        return f"<OomReport: {human_bytes(self.allocated_bytes)} alive in {len(self.held)} places>"

    def _repr_html_(self) -> str:
        return html_text(str(self))


def explain_oom(snapshot: str | os.PathLike[str]) -> OomReport:
    """What was alive when memory ran out, by where it was allocated, from a CUDA memory snapshot.

    Nothing of the file is executed, and torch is not needed.

    Args:
        snapshot: the path of a file that `torch.cuda.memory._dump_snapshot` wrote.

    Raises:
        InvalidValue: a file that is too large, no plain data, or no memory snapshot.
    """
    content, data = loaded(snapshot)
    try:
        device = _device(data["device_traces"])
        trace = data["device_traces"][device] if data["device_traces"] else ()
        segments = [each for each in data["segments"] if each.get("device", device) == device]
        n_reached = len(trace) + sum(len(segment["blocks"]) for segment in segments)
        if n_reached * LEAST_BYTES > len(content):
            raise ValueError(f"{n_reached} blocks and entries, some of them by reference to one place")
        settings, steps = data.get("allocator_settings") or {}, data.get("external_annotations") or ()
        return _Instant(segments, trace).report(steps, expandable=bool(settings.get("expandable_segments")))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        name = shown_path(snapshot)
        raise InvalidValue(f"{name} is no memory snapshot ({shown_value(error, 200)}); {WAY_OUT}") from None


def _device(traces: Sequence[Sequence[Mapping[str, Any]]]) -> int:
    """The device on which memory ran out last, or else that allocated most often."""
    failed = [i for i, trace in enumerate(traces) if _failed_at(trace) is not None]
    return failed[-1] if failed else max(range(len(traces)), key=lambda i: len(traces[i]), default=0)


def _failed_at(trace: Sequence[Mapping[str, Any]]) -> int | None:
    """The place of the last allocation that failed."""
    return next((i for i in reversed(range(len(trace))) if trace[i]["action"] == "oom"), None)


class _Instant:
    """A device's memory when an allocation failed, or else when most was allocated."""

    def __init__(self, segments: Sequence[Mapping[str, Any]], trace: Sequence[Mapping[str, Any]]) -> None:
        self.trace = trace
        self.stacks = _Stacks()
        self.alive = dict(_blocks(segments))
        self.spans = [_span(segment["address"], segment["total_size"]) for segment in segments]
        self.failed_at = _failed_at(trace)
        self.place = self._fullest() if self.failed_at is None else self.failed_at
        self.born = {e["addr"]: e for e in trace[: self.place] if e["action"] == "alloc"}
        for entry in reversed(trace[self.place :]):
            self._undo(entry)

    def _fullest(self) -> int:
        """The place in the trace before which most was allocated."""
        n_bytes = sum(size for size, _ in self.alive.values())
        most, place = n_bytes, len(self.trace)
        for i in reversed(range(len(self.trace))):
            sign = {"alloc": -1, "free_completed": 1}.get(self.trace[i]["action"], 0)
            n_bytes += sign * _rounded(self.trace[i]["size"]) if sign else 0
            if n_bytes > most:
                most, place = n_bytes, i
        return place

    def _undo(self, entry: Mapping[str, Any]) -> None:
        match entry["action"]:
            case "alloc":
                self.alive.pop(entry["addr"], None)
            case "free_requested" | "free_completed":
                known = self.born.get(entry["addr"], {})
                self.alive.setdefault(
                    _count(entry["addr"]), (_rounded(entry["size"]), known.get("frames", ()))
                )
            case "segment_alloc" | "segment_map":
                self.spans = list(_without(self.spans, _span(entry["addr"], entry["size"])))
            case "segment_free" | "segment_unmap":
                self.spans.append(_span(entry["addr"], entry["size"]))

    def report(self, steps: Sequence[Mapping[str, Any]], *, expandable: bool) -> OomReport:
        """The report of this instant; `steps`: the snapshot's annotations, those of optimizers among them."""
        failed = None if self.failed_at is None else self.trace[self.failed_at]
        now = self.trace[self.place - 1] if failed is None and self.place else failed
        frames = () if now is None else now.get("frames", ())
        updating = self.stacks.of(frames).what in ("optimizer", "update")
        held: dict[Origin, list[int]] = {}
        for address, (n_bytes, stack) in self.alive.items():
            origin = self.stacks.of(stack)
            if origin.what == "update" and not updating:
                origin = origin._replace(what="optimizer")
            if not stack and address not in self.born:
                origin = Origin("before", "")
            held.setdefault(origin, []).append(n_bytes)
        if not self.stacks.are_known:
            held = {Origin("unknown", ""): [n for sizes in held.values() for n in sizes]} if held else {}
        rows = [Held(**o._asdict(), n_bytes=sum(sizes), n_blocks=len(sizes)) for o, sizes in held.items()]
        until = None if now is None else now.get("time_us")
        return OomReport(
            asked_bytes=None if failed is None else _count(failed["size"]),
            asked_in=self.stacks.text(frames) if self.stacks.are_known else "",
            n_steps=_n_steps(steps, until),
            held=tuple(sorted(rows, key=lambda row: (-row.n_bytes, row.what, row.where))),
            reserved_bytes=sum(stop - start for start, stop in self.spans),
            largest_free_bytes=max(_free_pieces(self.spans, self.alive), default=0),
            device_free_bytes=None if failed is None else _count(failed["device_free"]),
            expandable=expandable,
        )


def _n_steps(annotations: Sequence[Mapping[str, Any]], until_us: int | None) -> int:
    """Optimizer steps that had ended at a time."""
    ends = [each for each in annotations if each["stage"] == "END" and each["name"].startswith(STEP)]
    return sum(1 for each in ends if until_us is None or each["time_us"] <= until_us)


def _blocks(segments: Iterable[Mapping[str, Any]]) -> Iterator[tuple[int, tuple[int, Any]]]:
    """The blocks in use by address: their bytes, and the calls that they were allocated in."""
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            n_bytes = _count(block["size"])
            if block["state"] != "inactive":
                yield _count(block.get("address", address)), (n_bytes, block.get("frames", ()))
            address += n_bytes


def _free_pieces(spans: Iterable[Span], alive: Mapping[int, tuple[int, Any]]) -> Iterator[int]:
    """Bytes of each piece of the segments that no block covers."""
    addresses = sorted(alive)
    for start, stop in spans:
        within = addresses[bisect_left(addresses, start) : bisect_left(addresses, stop)]
        ends = [start, *(address + alive[address][0] for address in within)]
        yield from (n for end, begin in zip(ends, [*within, stop], strict=True) if (n := begin - end) > 0)


def _without(spans: Iterable[Span], taken: Span) -> Iterator[Span]:
    """Spans of addresses without those of another one."""
    for start, stop in spans:
        before, after = (start, min(stop, taken[0])), (max(start, taken[1]), stop)
        yield from (part for part in (before, after) if part[0] < part[1])


def _span(address: object, n_bytes: object) -> Span:
    start = _count(address)
    return start, start + _count(n_bytes)


def _rounded(n_bytes: object) -> int:
    return -(-_count(n_bytes) // ROUNDED) * ROUNDED


def _count(value: object) -> int:
    return checked_count("a count of bytes or an address", value, least=0, most=2**64)


class _Stacks:
    """What stacks say of the blocks allocated in them; a stack that blocks share is looked at once."""

    def __init__(self) -> None:
        self.known: dict[int, Origin] = {}
        self.are_known = False

    def of(self, frames: Sequence[Mapping[str, Any]]) -> Origin:
        """The origin of blocks that were allocated in these calls, the innermost first."""
        if id(frames) not in self.known:
            calls = [_Call.of(frame) for frame in frames]
            python = [call for call in calls if call.is_python]
            self.are_known = self.are_known or bool(python)
            self.known[id(frames)] = Origin(_what(python), _where(python))
        return self.known[id(frames)]

    def text(self, frames: Sequence[Mapping[str, Any]]) -> str:
        """Where an allocation was asked for, in words."""
        what, where = self.of(frames)
        return where or f"the {WHAT[what].partition(':')[0]}"


class _Call(NamedTuple):
    """A call on a stack."""

    name: str
    file: str
    line: int

    @staticmethod
    def of(frame: Mapping[str, Any]) -> "_Call":
        name, file, line = frame["name"], frame["filename"], frame["line"]
        if not (isinstance(name, str) and isinstance(file, str)):
            raise TypeError("a frame's name and filename are not texts")
        return _Call(name[:MOST_OF_A_NAME], file.replace("\\", "/"), checked_count("a line", line, least=0))

    @property
    def is_python(self) -> bool:
        return self.file.endswith(".py") or self.file.startswith("<")

    @property
    def is_library(self) -> bool:
        return any(folder in self.file for folder in LIBRARIES) or self.file.startswith("<frozen")

    def __str__(self) -> str:
        return f"{self.file.rpartition('/')[2][-MOST_OF_A_NAME:]}:{self.line} {self.name}"


def _what(calls: Sequence[_Call]) -> str:
    """The key of `WHAT` of Python's calls, the innermost first; without any, autograd's thread made them."""
    names = {call.name for call in calls}

    def called(file: str, *of: str) -> bool:
        return any(file in call.file and (not of or call.name in of) for call in calls)

    sharding = next((i for i, call in enumerate(calls) if "torch/distributed/fsdp/" in call.file), None)
    if not calls or (called("torch/autograd/function.py", "apply") and "backward" in names):
        return "backward"
    if called("torch/utils/checkpoint.py", "unpack_hook", "recompute_fn", "backward"):
        return "recomputed"
    if sharding is not None and all(call.name != "forward" for call in calls[:sharding]):
        return "gathered"
    if called("torch/optim/"):
        return "optimizer" if "_init_group" in names else "update"
    if called("torch/nn/modules/module.py", "_apply", "load_state_dict") or called(
        "torch/nn/modules/", "__init__"
    ):
        return "weights"
    if "forward" in names or called("torch/nn/"):
        return "forward"
    return "other"


def _where(calls: Sequence[_Call]) -> str:
    """The user's own innermost line, and the function of a library that was called there."""
    if not calls:
        return ""
    own = next((call for call in calls if not call.is_library), calls[0])
    inner = (
        ""
        if own is calls[0]
        else f" > {calls[0].file.rpartition('/')[2].removesuffix('.py')}.{calls[0].name}"
    )
    return printable(f"{own}{inner}")


def oom_text(report: OomReport) -> str:
    """The text of a report: what failed, what was alive, what to do; in lines of at most 80 characters."""
    after = f" after {report.n_steps} optimizer step{'s' * (report.n_steps != 1)}" if report.n_steps else ""
    if report.asked_bytes is None:
        head = f"NO ALLOCATION FAILED in this trace. Most was allocated{after}:"
    else:
        where = f" in {report.asked_in}" if report.asked_in else ""
        head = f"OUT OF MEMORY: {human_bytes(report.asked_bytes)} more were asked for{where}{after}."
    state = f"{human_bytes(report.allocated_bytes)} were allocated. The allocator had reserved "
    state += f"{human_bytes(report.free_bytes)} more, free, the largest piece "
    state += human_bytes(report.largest_free_bytes)
    if report.device_free_bytes is not None:
        state += f"; the GPU had {human_bytes(report.device_free_bytes)} free"
    advice = [wrapped(f"{i}. {text}", indent="   ") for i, text in enumerate(_advice(report), start=1)]
    tables = (_table_of_kinds(report), _table_of_places(report))
    return "\n\n".join(
        [f"{wrapped(head)}\n{wrapped(f'{state}.')}", *tables, "\n".join(["What to do", *advice])]
    )


def _table_of_kinds(report: OomReport) -> str:
    unit, name = binary_unit(report.allocated_bytes)
    rows = [(f"alive {name}", "part", "what")]
    for what, n_bytes in report.by_what.items():
        part = f"{n_bytes / max(1, report.allocated_bytes):.0%}"
        rows.append((scaled(n_bytes, unit, 2), part, WHAT[what]))
    return text_table(rows, ">><")


def _table_of_places(report: OomReport) -> str:
    unit, name = binary_unit(report.allocated_bytes)
    rows = [(f"alive {name}", "blocks", "what", "allocated in")]
    for each in report.held[:MOST_PLACES]:
        what = WHAT[each.what].partition(":")[0]
        rows.append((scaled(each.n_bytes, unit, 2), f"{each.n_blocks:,}", what, each.where or "-"))
    if more := report.held[MOST_PLACES:]:
        n_bytes, n_blocks = sum(each.n_bytes for each in more), sum(each.n_blocks for each in more)
        rows.append((scaled(n_bytes, unit, 2), f"{n_blocks:,}", "more", f"{len(more)} other places"))
    return text_table(rows, ">><<", flexible=[3])


def _advice(report: OomReport) -> Iterator[str]:
    """What to do, the surest first."""
    asked, free_bytes = report.asked_bytes or 0, report.device_free_bytes
    if free_bytes is not None and free_bytes >= asked:
        yield (
            f"The GPU had {human_bytes(free_bytes)} free: the process may not use them. Raise or remove its "
            "limit (torch.cuda.set_per_process_memory_fraction)."
        )
    if report.is_fragmented:
        yield (
            "Fragmentation: enough was reserved and free, but in pieces that were too small. "
            f"{JOINED if report.expandable else EXPANDABLE}"
        )
    elif report.asked_bytes is not None:
        yield (
            f"No setting of the allocator would have helped: what was free in its segments is less than the "
            f"{human_bytes(asked)} that were asked for."
        )
    if report.held:
        largest = next(iter(report.by_what))
        yield ADVICE[largest]
    loss_bytes = sum(each.n_bytes for each in report.held if any(name in each.where for name in LOSSES))
    if loss_bytes * 10 > report.allocated_bytes > 0:
        yield LOSS.format(human_bytes(loss_bytes))
    yield (
        "What each such change frees and costs: memplan advise MODEL --cluster NxGPU, with the flags of your "
        "plan."
    )
