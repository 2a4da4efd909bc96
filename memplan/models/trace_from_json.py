"""A traced model from its JSON, which holds data only, no code; every field is checked when it is read."""

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, Final, NamedTuple, cast, get_args

from memplan.checks import LARGEST, LARGEST_BYTES, checked_choice, checked_count
from memplan.device import DeviceType
from memplan.errors import InvalidValue, MemplanError, shown_value, unknown_name
from memplan.files import file_text, json_value, of_file
from memplan.mesh import Group, checked_group
from memplan.models.base import BLOCKS, MOST_LAYERS, Layers, Role
from memplan.models.recording import (
    CONVOLVED,
    DTYPES,
    HOOKS,
    MODULE,
    OF_COMPILED,
    OPERANDS,
    PARTS,
    PHASES,
    ROTATES,
    ULYSSES,
    UNITS,
    Computation,
    Cut,
    Ends,
    Placed,
    Recording,
    Size,
    Term,
    TracedBuffer,
    TracedEvent,
    TracedKind,
    TracedTensor,
    Variant,
    called_kinds,
    part_of_kind,
    parts_with,
)
from memplan.models.trace_to_json import FORMATS, TENSORS, UNDIVIDED
from memplan.models.traced import TracedModel
from memplan.models.workspaces import Asked, Run
from memplan.ops.kernel_calls import KERNELS
from memplan.placements import Shard
from memplan.record import CollectiveKind, ComputeKind
from memplan.shapes import KINDS, DType

BEGINS: Final = b'{"format":"memplan trace '
"""How a file begins."""

LARGEST_TRACE_BYTES: Final = 64 * 1024**2
"""A trace is some hundred KiB; a larger file is taken for a mistake."""

MOST_VALUES: Final = 3_000_000
"""The most values of a trace; a module of 250,000 operations and frees has 600,000."""

MOST_DIMS: Final = 64
"""The most dims of a tensor (`at::MAX_DIMS`), and the most sizes that an operation has."""

MOST_RESULTS: Final = 4
"""The most results that a kernel returns."""


def _placed(values: list[Any], mesh: Mapping[Group, int]) -> Placed:
    found = []
    for one in values:
        axis, placement = _items(one, "placement", str, int | str)
        if axis not in mesh or placement not in (*range(MOST_DIMS), *UNDIVIDED):
            raise _wrong(f"placement {shown_value(one)} is not allowed in a trace")
        found.append((axis, UNDIVIDED[placement] if placement in UNDIVIDED else Shard(placement)))
    return tuple(found)


def model_from_trace(path: str | os.PathLike[str]) -> TracedModel:
    """The model in a file that `TracedModel.save` has written.

    Raises:
        InvalidValue: a file that cannot be read as a trace, and why.
    """
    try:
        return model_of_text(file_text(path, most_bytes=LARGEST_TRACE_BYTES, what="trace"))
    except MemplanError as error:
        raise of_file(path, error) from None


def model_of_text(text: str) -> TracedModel:
    """The model in a text that `TracedModel.save` has written.

    Raises:
        InvalidValue: a text that is no trace, and why.
    """
    n_values = text.count(",")
    if n_values > MOST_VALUES:
        raise _wrong(f"holds {n_values} values, and a trace has {MOST_VALUES} at most")
    return _model(json_value(text, what="trace", way_out="trace the module again"))


def _wrong(what: str) -> InvalidValue:
    return InvalidValue(f"{what}; trace the module again.")


def is_trace(path: str | os.PathLike[str]) -> bool:
    """Whether a file begins as a trace does."""
    try:
        if not os.path.isfile(path):
            return False
        with open(path, "rb") as file:
            return file.read(len(BEGINS)) == BEGINS
    except (OSError, ValueError, TypeError):
        return False


def _recordings(of: "_Reader", known: "_Known", *, older: bool) -> Iterator[tuple[Variant, Recording]]:
    """Each recording by its variant; `older`: as the first format has them."""
    for one in of("recordings", list):
        within = _Reader(one)
        recording = (_older_recording if older else _recording)(within, known)
        if isinstance(recording.cut, Cut):
            _check_cut(recording, recording.cut)
        yield _variant(within("run", list)), recording


def _model(data: Any) -> TracedModel:
    if not isinstance(data, dict) or data.get("format") not in FORMATS:
        raise InvalidValue(
            f"is no trace; a trace's format is {' or '.join(FORMATS)}: write one with TracedModel.save."
        )
    of = _Reader(data)
    limits, lengths = of("limits", list | None), of("lengths", list | None) or [0, 0]
    frozen, mesh = set(_texts(of("frozen", list), "frozen")), _mesh(of)
    tensors: dict[str, Any] = {name: _tensors(of(name, list), name, frozen, mesh) for name in TENSORS}
    layers, of_kind = _layers(of, frozen, mesh)
    parameters = [*tensors["embed_parameters"], *tensors["head_parameters"]]
    parameters += [one for kind in of_kind.values() for one in kind.parameters]
    names = {one.name for one in parameters if one.requires_grad}
    device = of("device", str)
    if device not in get_args(DeviceType):
        raise InvalidValue(f"device={shown_value(device)} is not allowed; use one of {get_args(DeviceType)}.")
    known = _Known(
        [_buffer(one) for one in of("buffers", list)],
        [_computation(one) for one in of("computations", list | None) or []],
        [_convolution(one) for one in of("convolutions", list | None) or []],
        names,
        {one.name for one in parameters},
        parts_with(called_kinds(of_kind)),
        mesh,
    )
    asked = of("asked", dict | None)
    recordings = dict(_recordings(of, known, older=data["format"] == FORMATS[0]))
    if not recordings:
        raise _wrong("recordings is empty")
    model = TracedModel(
        name=of("name", str) or "traced",
        device=device,
        made_with=of("made_with", str),
        layers=layers,
        of_kind=of_kind,
        blocks=tuple(filter(None, of("blocks", str).split(", "))),
        max_seq_len=checked_count("max_seq_len", of("max_seq_len", int)),
        has_sequence=of("has_sequence", bool),
        limits=None if limits is None else _two("limits", limits, least=0),
        lengths=_two("lengths", lengths, least=0),
        image_tokens=checked_count("image_tokens", of("image_tokens", int | None) or 0, least=0),
        neglects=_texts(of("neglects", list | None) or [], "neglects"),
        unused=_texts(of("unused", list | None) or [], "unused"),
        lacks=_texts(of("lacks", list | None) or [], "lacks"),
        attention=of("attention", str | None) or "",
        mesh=mesh,
        config=json.dumps(of("config", dict | None) or {}, sort_keys=True) if data.get("config") else "",
        asked=Asked() if asked is None else _asked(_Reader(asked), known.convolutions),
        tied=of("tied", bool),
        recordings=recordings,
        **tensors,
    )
    check_balance(model)
    return model


def _mesh(of: "_Reader") -> dict[Group, int]:
    """The ranks along each axis; none before the fourth format."""
    mesh = of("mesh", dict) if of.data["format"] in FORMATS[3:] and "mesh" in of.data else {}
    return {checked_group(axis): checked_count(axis, n, least=2) for axis, n in mesh.items()}


def _layers(
    of: "_Reader", frozen: set[str], mesh: Mapping[Group, int]
) -> tuple[tuple[Layers, ...], dict[str, TracedKind]]:
    """The blocks by kind, and each kind; before the third format there is one."""
    if of.data["format"] in FORMATS[:2]:
        n = checked_count("n_blocks", of("n_blocks", int), least=0, most=MOST_LAYERS)
        own = _tensors(of("block_parameters", list), "block_parameters", frozen, mesh)
        return (Layers(BLOCKS, n),), {BLOCKS: TracedKind("block", own)}
    of_kind: dict[str, TracedKind] = {}
    for kind, value in of("kinds", dict).items():
        role, own = _items(value, "kind", str, list)
        checked_choice("role", role, get_args(Role))
        of_kind[kind] = TracedKind(cast(Role, role), _tensors(own, kind, frozen, mesh))
    layers = [_items(one, "layers", str, int) for one in of("layers", list)]
    if not layers or layers[0][0] != BLOCKS or {kind for kind, _ in layers} != {*of_kind}:
        raise _wrong(f"layers {shown_value(layers)} are not of the kinds {shown_value(list(of_kind))}")
    for _, n in layers:
        checked_count("layers", n)
    checked_count("layers", sum([n for _, n in layers]), most=MOST_LAYERS)
    return tuple([Layers(kind, n) for kind, n in layers]), of_kind


class _Reader:
    """Reads values out of an object of a file and checks their kinds."""

    def __init__(self, data: Any) -> None:
        if not isinstance(data, dict):
            raise _wrong(f"holds {shown_value(data)} where an object is needed")
        self.data = data

    def __call__(self, key: str, kind: Any) -> Any:
        value = self.data.get(key)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise _wrong(f"{key}={shown_value(value)} is not allowed in a trace")
        return value


def _items(value: Any, what: str, *kinds: Any) -> list[Any]:
    """A list of values of these kinds."""
    right = isinstance(value, list) and len(value) == len(kinds)
    if not right or not all(isinstance(one, kind) for one, kind in zip(value, kinds, strict=True)):
        raise _wrong(f"{what} {shown_value(value)} is not allowed in a trace")
    return list(value)


def _texts(values: list[Any], what: str) -> tuple[str, ...]:
    return tuple(_items(values, what, *[str] * len(values)))


def _two(what: str, values: list[Any], least: int) -> tuple[int, int]:
    first, second = values if len(values) == 2 else (None, None)
    return checked_count(what, first, least=0), checked_count(what, second, least=least)


def _size(value: Any) -> Size:
    return _whole_size(value) if type(value) is int else _sum(value)


@lru_cache(maxsize=2**16)
def _whole_size(value: int) -> Size:
    return _sum([[value]])


def _sum(value: Any) -> Size:
    if not isinstance(value, list) or len(value) > 8:
        raise _wrong(f"size {shown_value(value)} is not allowed in a trace")
    for term in value:
        right = _are_whole(term, 1, 4) and abs(term[0]) <= LARGEST**2 and all(0 <= n <= 4 for n in term[1:3])
        if not right or not all(1 <= n <= LARGEST for n in term[3:]):
            raise _wrong(f"size {shown_value(term)} is not allowed in a trace")
    return tuple([Term(*term) for term in value])


def _are_whole(values: Any, least: int, most: int = 3) -> bool:
    """Whether the value is a list of `least` to `most` integers."""
    return isinstance(values, list) and least <= len(values) <= most and all(type(n) is int for n in values)


def _shape(value: list[Any]) -> tuple[Size, ...]:
    if len(value) > MOST_DIMS:
        raise _wrong(f"a shape of {len(value)} dims is not allowed in a trace, which has {MOST_DIMS} at most")
    return tuple([_size(dim) for dim in value])


def _dtype(name: Any) -> DType:
    if not isinstance(name, str) or name not in DTYPES:
        raise InvalidValue(
            f"type {shown_value(name)} is not allowed in a trace; use one of {', '.join(DTYPES)}."
        )
    return DTYPES[name]


def _tensors(
    values: list[Any], what: str, frozen: set[str], mesh: Mapping[Group, int]
) -> tuple[TracedTensor, ...]:
    return tuple([_tensor(one, what, frozen, mesh) for one in values])


def _tensor(value: Any, what: str, frozen: set[str], mesh: Mapping[Group, int]) -> TracedTensor:
    row = value if isinstance(value, list) else [value]
    row, gathered = (row[:-1], row[-1:]) if len(row) in (4, 6) else (row, [])
    row = row if len(row) == 5 else [*_items(row, what, str, list, str), [], []]
    name, shape, dtype, placed, of_grad = _items(row, what, str, list, str, list, list)
    return TracedTensor(
        name,
        _shape(shape),
        _dtype(dtype).name,
        name not in frozen,
        _placed(placed, mesh),
        _placed(of_grad, mesh),
        *[_dtype(one).name for one in gathered],
    )


def _variant(value: list[Any]) -> Variant:
    run = [*value, *Variant("", "", "", alone=False)[len(value) :]]
    weights, autocast, recompute, alone, units, rotate, cp_rank = _items(
        run, "run", str, str, str, bool, str, str, int
    )
    _dtype(weights)
    if autocast:
        _dtype(autocast)
    checked_choice("recompute", recompute, OF_COMPILED)
    checked_choice("units", units, (*UNITS, MODULE))
    checked_choice("rotate", rotate, ("", *ROTATES, ULYSSES))
    return Variant(
        weights, autocast, recompute, alone, units, rotate, checked_count("cp_rank", cp_rank, least=0)
    )


def _convolution(value: Any) -> TracedEvent:
    part, sizes, dtype = _items(value, "convolution", str, list, str)
    checked_choice("part", part, CONVOLVED)
    return TracedEvent("workspace", kernel=part, shape=_shape(sizes), dtype=_dtype(dtype).name)


def _computation(value: Any) -> Computation:
    follows = isinstance(value, list) and len(value) == len(Computation._fields) - 1
    kinds = str, list, list, str, int | list
    name, operands, shape, dtype, flops = _items([*value, 0] if follows else value, "computation", *kinds)
    kind = ComputeKind(checked_choice("kind", name, tuple([one.value for one in ComputeKind])))
    n, dims = OPERANDS.get(kind, (0, ())) if follows else (0, ())
    if len(operands) != n or not all(isinstance(one, list) and len(one) in dims for one in operands):
        raise _wrong(f"operands {shown_value(operands)} of {name} are not allowed in a trace")
    return Computation(kind, tuple(map(_shape, operands)), _shape(shape), _dtype(dtype).name, _size(flops))


def _asked(within: _Reader, convolutions: list[TracedEvent]) -> Asked:
    batches = [checked_count("batch", one) for one in within("batches", list)]
    _check_ascends(batches, "batches")
    runs = {}
    for gpu, tables in within("runs", dict).items():
        each = [_runs(table) for table in _items(tables, "runs", *[list] * len(convolutions))]
        if any(table[-1].last != batches[-1] for table in each):
            raise _wrong(f"runs of {shown_value(gpu)} end before the last micro-batch")
        runs[gpu] = dict(zip(convolutions, each, strict=True))
    return Asked(library=within("library", str), batches=tuple(batches), runs=runs)


def _runs(table: list[Any]) -> tuple[Run, ...]:
    for run in table:
        if not _are_whole(run, 2) or max(map(abs, run)) > LARGEST_BYTES:
            raise _wrong(f"run {shown_value(run)} is not allowed in a trace")
    _check_ascends([run[0] for run in table], "runs")
    return tuple([Run(*run) for run in table])


def _check_ascends(values: list[int], what: str) -> None:
    """Raise unless there are values, and each is larger than the one before."""
    if not values or any(one >= other for one, other in pairwise(values)):
        raise _wrong(f"{what} {shown_value(values)} do not ascend")


class _Known(NamedTuple):
    """What recordings may refer to."""

    buffers: list[TracedBuffer]
    computations: list[Computation]
    convolutions: list[TracedEvent]
    parameters: set[str]
    weights: set[str]
    parts: tuple[str, ...]
    mesh: Mapping[Group, int]


def _recording(within: _Reader, known: _Known) -> Recording:
    buffers = [known.buffers[_place(one, len(known.buffers))] for one in within("buffers", list)]
    parts = _Reader(within("parts", dict))
    boundary, boundary_grad, requires_grad = _items(within("boundary", list), "boundary", int, int, bool)
    n = len(buffers)
    for i in (boundary, boundary_grad):
        checked_count("boundary", i, least=-1, most=n - 1)
    return Recording(
        tuple(buffers),
        {
            part: tuple(
                [
                    _moved(one) if type(one) is int and -n <= one < n else _event(one, n, known)
                    for one in parts(part, list)
                ]
            )
            for part in known.parts
        },
        boundary,
        boundary_grad,
        requires_grad,
        _cut(within("cut", list | str | None), n),
        _ends(within("ends", list | str | None), parts),
    )


def _older_recording(within: _Reader, known: _Known) -> Recording:
    """A recording in the first format, in which what is computed after a workspace is a convolution."""
    recording = _recording(within, known)
    parts = {part: tuple(_with_convolutions(events)) for part, events in recording.parts.items()}
    return recording._replace(parts=parts)


def _with_convolutions(events: Iterable[TracedEvent]) -> Iterator[TracedEvent]:
    kind = ComputeKind.UNKNOWN
    for one in events:
        if one.kind == "workspace":
            kind = ComputeKind.CONVOLUTION
        elif one.kind == "compute":
            one = one._replace(computation=one.computation._replace(kind=kind))
            kind = ComputeKind.UNKNOWN
        yield one


def _ends(value: list[Any] | str | None, parts: _Reader) -> Ends | str | None:
    if not isinstance(value, list):
        return value
    *ends, embed_backward, head_backward = _items(value, "ends", list, list, int, int)
    (a, b), (c, d) = (_items(places, "ends", int, int) for places in ends)
    of_part = {"embed": (a, b), "head": (c, d), "embed_backward": (embed_backward,)}
    for part, places in (of_part | {"head_backward": (head_backward,)}).items():
        for place in places:
            checked_count("ends", place, least=0, most=len(parts(part, list)))
    return Ends((a, b), (c, d), embed_backward, head_backward)


def _cut(value: list[Any] | str | None, n_buffers: int) -> Cut | str | None:
    if not isinstance(value, list):
        return value
    found = Cut(*_items(value, "cut", int, str, int, str, list, int, int, list))
    for part in (found.entry_freed, found.last_freed):
        checked_choice("part", part, PARTS)
    perhaps = found.entry_grad, found.output, found.loss
    for i in (found.entry, *found.embedded, *found.recast, *[i for i in perhaps if i != -1]):
        _place(i, n_buffers)
    return found._replace(embedded=tuple(found.embedded), recast=tuple(found.recast))


def _place(value: Any, n: int) -> int:
    if type(value) is int and 0 <= value < n:
        return value
    return checked_count("buffer", value, least=0, most=n - 1)


def _buffer(value: Any) -> TracedBuffer:
    name, shape, dtype, n_bytes, kind = _items(value, "buffer", str, list, str, int | list, str)
    if kind not in KINDS:
        raise InvalidValue(
            f"kind {shown_value(kind)} is not allowed in a trace; use one of {', '.join(KINDS)}."
        )
    return TracedBuffer(name, _shape(shape), _dtype(dtype), _size(n_bytes), kind)


def _event(value: Any, n_buffers: int, known: _Known) -> TracedEvent:
    if isinstance(value, int):
        _place(value if value >= 0 else -1 - value, n_buffers)
        return _moved(value)
    if isinstance(value, list) and len(value) == 1:
        return TracedEvent("add", _place(value[0], n_buffers))
    if isinstance(value, list) and len(value) == 3 and isinstance(value[0], str):
        when, path, of = _items(value, "hook", str, str, list)
        checked_choice("hook", when, HOOKS)
        if not {*(names := _texts(of, "hook"))} <= known.weights:
            raise _wrong(f"parameters {shown_value(names)} of {shown_value(path)} are not all the module's")
        return TracedEvent("module", parameter=path, kernel=when, parameters=names)
    if isinstance(value, list) and len(value) == 3:
        called, shape, dtype = _items(value, "collective", list, list, str)
        phase, kind, axis = _items(called, "collective", str, str, str)
        checked_choice("phase", phase, PHASES)
        checked_choice("kind", kind, get_args(CollectiveKind))
        if axis not in known.mesh:
            raise _wrong(f"a collective over {shown_value(axis)} is over no axis of the mesh")
        return TracedEvent(
            "collective", phase=phase, kernel=kind, axis=axis, shape=_shape(shape), dtype=_dtype(dtype).name
        )
    if isinstance(value, list) and len(value) == 2:
        what, of = value
        if what == "workspace":
            return known.convolutions[_place(of, len(known.convolutions))]
        if what in HOOKS:
            names = _texts(_items(value, "hook", str, list)[1], "hook")
            if not set(names) <= known.weights:
                raise _wrong(f"parameters {shown_value(names)} are not all the module's")
            return TracedEvent("hook", kernel=what, parameters=names)
        if what in PHASES:
            computation = known.computations[_place(of, len(known.computations))]
            return TracedEvent("compute", phase=what, computation=computation)
        if not isinstance(of, str) or of not in known.parameters:
            raise _wrong(f"parameter {shown_value(of)} is none that the module trains")
        return TracedEvent("grad", _place(what, n_buffers), of)
    phase, flops, shape, dtype = _items(value, "event", str, int | list, list, str)
    if phase in KERNELS and len(shape) == KERNELS[phase].n_sizes:
        n_results = checked_count("results", flops, least=0, most=MOST_RESULTS)
        return TracedEvent(
            "kernel", kernel=phase, n_results=n_results, shape=_shape(shape), dtype=_dtype(dtype).name
        )
    if phase not in PHASES:
        raise unknown_name("phase", phase, PHASES)
    computation = Computation(ComputeKind.UNKNOWN, (), _shape(shape), _dtype(dtype).name, _size(flops))
    return TracedEvent("compute", phase=phase, computation=computation)


@lru_cache(maxsize=2**16)
def _moved(value: int) -> TracedEvent:
    return TracedEvent("alloc", value) if value >= 0 else TracedEvent("free", -1 - value)


def _played(layers: Sequence[Layers]) -> list[tuple[str, int]]:
    """The parts of a step in the order in which they run, with how many times each runs in a row.

    >>> [f"{n} {part}" for part, n in _played([Layers(BLOCKS, 3), Layers("experts", 2)]) if "_" not in part]
    ['1 inputs', '1 embed', '1 entry', '2 block', '2 experts', '1 head', '1 loss', '1 end']
    """
    first = min(1, sum([n for _, n in layers]))
    runs = [(part_of_kind(kind), n - first * (i == 0)) for i, (kind, n) in enumerate(layers)]
    order: list[tuple[str, int]] = []
    for part in PARTS:
        stem, _, suffix = part.partition("_")
        if stem == "block":
            of_kinds = runs[::-1] if suffix == "backward" else runs
            order += [(f"{kind}_{suffix}" if suffix else kind, n) for kind, n in of_kinds]
        else:
            order.append((part, first if stem == "entry" else 1))
    return order


def check_balance(model: TracedModel) -> None:
    """Raise unless each recording frees what it allocates, but for the gradients of what is trained.

    Raises:
        InvalidValue: names a buffer or a parameter for which that does not hold.
    """
    played = _played([one for one in model.layers if model.role(one.kind) != "idle"])
    trained = {one.name for one, _ in model.parameters if one.requires_grad}
    for recording in model.recordings.values():
        _check_sums(recording, played, trained)


def _check_sums(recording: Recording, played: Sequence[tuple[str, int]], trained: set[str]) -> None:
    """Raise for a buffer that is freed before it is allocated, or never freed although it is no gradient.

    Every parameter that is trained gets a gradient; a kernel's results come right after it.
    """
    held: Counter[int] = Counter()
    with_gradient: set[str] = set()
    for part, n in played:
        events = recording.parts[part]
        for buffer, (net, least) in _changes(events, part).items() if n else ():
            if not least and not net:
                continue
            if held[buffer] + min(0, (n - 1) * net) + least < 0:
                raise _wrong(f"{part} frees {_named(recording, buffer)}, which nothing has allocated")
            held[buffer] += n * net
        with_gradient.update([one.parameter for one in events if one.kind == "grad"] if n else ())
    left = next((buffer for buffer, n in held.items() if n), None)
    if left is not None:
        raise _wrong(f"nothing frees {_named(recording, left)}, and it is no gradient")
    if with_gradient != trained:
        raise _wrong(f"parameter {shown_value(min(trained - with_gradient))} is trained and has no gradient")


def _check_cut(recording: Recording, cut: Cut) -> None:
    """Raise unless what passes between stages is freed where the cut says so."""
    for part, buffer in ((cut.entry_freed, cut.entry), ("end", cut.loss)):
        if TracedEvent("free", buffer) not in recording.parts[part]:
            raise _wrong(f"cut says that {part} frees {_named(recording, buffer)}, which it does not")
    if TracedEvent("alloc", recording.boundary) not in recording.parts["entry"]:
        raise _wrong(f"no block allocates {_named(recording, recording.boundary)}, the boundary of blocks")


def _named(recording: Recording, buffer: int) -> str:
    return shown_value(recording.buffers[buffer].name)


def _changes(events: Sequence[TracedEvent], part: str) -> dict[int, tuple[int, int]]:
    """How many more of each buffer there are after some events, and the least on the way, at most 0."""
    found: dict[int, tuple[int, int]] = {}
    n_results = 0
    for one in events:
        kind, buffer = one.kind, one.buffer
        if kind == "alloc":
            n_results = n_results and n_results - 1
            net, least = found.get(buffer, (0, 0))
            found[buffer] = net + 1, least
            continue
        if n_results:
            raise _wrong(f"{part} has a kernel without its results")
        if kind == "kernel":
            n_results = one.n_results
        elif kind in ("free", "add", "grad"):
            net, least = found.get(buffer, (0, 0))
            found[buffer] = net - (kind != "add"), least if least < net else net - 1
    if n_results:
        raise _wrong(f"{part} has a kernel without its results")
    return found
