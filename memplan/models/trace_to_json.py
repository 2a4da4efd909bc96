"""A traced model as the plain values of its JSON."""

from collections.abc import Hashable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from memplan.models.base import BLOCKS
from memplan.models.recording import (
    Computation,
    Recording,
    Size,
    Term,
    TracedBuffer,
    TracedEvent,
    TracedTensor,
    Variant,
)
from memplan.models.workspaces import Asked, Run
from memplan.placements import Partial, Placement, Replicate, Shard

if TYPE_CHECKING:
    from memplan.models.traced import TracedModel

FORMATS: Final = (
    "memplan trace 1",
    "memplan trace 2",
    "memplan trace 3",
    "memplan trace 4",
    "memplan trace 5",
)
"""The formats that a file may name.

In the first, computations have FLOPs only. The third has `layers` and `kinds` instead of `n_blocks` and
`block_parameters`; it is written where not all blocks are of one kind, else the second. The fourth, of a
module that is divided over a `mesh`, has collectives and placements too. The fifth is of ZeRO-3 alone, with
the hooks of every module.
"""


class _Tables(NamedTuple):
    """What recordings share, each once, by its index."""

    buffers: dict[TracedBuffer, int]
    computations: dict[Computation, int]
    convolutions: dict[TracedEvent, int]


def plain(model: "TracedModel") -> dict[str, Any]:
    """Plain values, as they are written."""
    tables, of_one_kind = (
        _Tables({}, {}, {}),
        list(model.of_kind) == [BLOCKS] and not (model.mesh or model.is_zero3),
    )
    plain_kinds = {kind: [role, _plain_tensors(own)] for kind, (role, own) in model.of_kind.items()}
    return {
        "format": FORMATS[4 if model.is_zero3 else 3 if model.mesh else 1 if of_one_kind else 2],
        "name": model.name,
        "device": model.device,
        "made_with": model.made_with,
        **({"n_blocks": model.n_layers} if of_one_kind else {"layers": model.layers}),
        "blocks": ", ".join(model.blocks),
        "max_seq_len": model.max_seq_len,
        "has_sequence": model.has_sequence,
        "limits": model.limits,
        **({"lengths": model.lengths} if any(model.lengths) else {}),
        **({"image_tokens": model.image_tokens} if model.image_tokens else {}),
        **({"neglects": model.neglects} if model.neglects else {}),
        **({"unused": model.unused} if model.unused else {}),
        **({"lacks": model.lacks} if model.lacks else {}),
        **({"attention": model.attention} if model.attention else {}),
        **({"mesh": dict(model.mesh)} if model.mesh else {}),
        "tied": model.tied,
        "embed_parameters": _plain_tensors(model.embed_parameters),
        **({"block_parameters": plain_kinds[BLOCKS][1]} if of_one_kind else {"kinds": plain_kinds}),
        **{name: _plain_tensors(getattr(model, name)) for name in TENSORS[1:]},
        "frozen": model.frozen,
        "recordings": [
            {"run": _plain_variant(variant), **_plain_recording(recording, tables)}
            for variant, recording in model.recordings.items()
        ],
        "buffers": list(map(_plain_buffer, tables.buffers)),
        "computations": list(map(_plain_computation, tables.computations)),
        **(_plain_convolutions(model.asked, tables.convolutions) if tables.convolutions else {}),
    }


def _plain_convolutions(asked: Asked, convolutions: Iterable[TracedEvent]) -> dict[str, Any]:
    """The convolutions, which events name by their index, and what cuDNN was asked about each."""
    runs = {gpu: [[*map(_plain_run, of[one])] for one in convolutions] for gpu, of in asked.runs.items()}
    return {
        "convolutions": [[one.kernel, _plain_shape(one.shape), one.dtype] for one in convolutions],
        "asked": {"library": asked.library, "batches": asked.batches, "runs": runs} if runs else None,
    }


def _plain_run(run: Run) -> list[int]:
    return [*run] if run.per_sample else [*run[:-1]]


def _plain_tensors(tensors: Iterable[TracedTensor]) -> list[Any]:
    return [[one.name, _plain_shape(one.shape), one.dtype, *_plain_placed(one)] for one in tensors]


def _plain_placed(one: TracedTensor) -> list[Any]:
    """The placements of a DTensor and of its gradient, and the type in which a tensor is gathered, if any."""
    gathered = [one.gathered_as] if one.gathered_as else []
    if not one.placements:
        return gathered
    both = one.placements, one.grad_placements
    return [[[axis, _plain_placement(own)] for axis, own in placed] for placed in both] + gathered


def _plain_placement(placement: Placement) -> int | str:
    return placement.dim if isinstance(placement, Shard) else type(placement).__name__


UNDIVIDED: Final[Mapping[Any, Placement]] = {"Replicate": Replicate(), "Partial": Partial()}
"""The placements that divide no dim, by name."""

TENSORS: Final = (
    "embed_parameters",
    "head_parameters",
    "module_buffers",
    "inputs_of_step",
)


def _plain_variant(variant: Variant) -> list[Any]:
    """Its values; without the last ones where these are their defaults."""
    values, usual = [*variant], [*Variant("", "", "", alone=False)]
    while values[-1] == usual[len(values) - 1] and len(values) > N_ALWAYS:
        values.pop()
    return values


N_ALWAYS: Final = 4
"""The values of a variant that are always written."""


def _plain_size(size: Size) -> Any:
    if len(size) == 1 and size[0] == Term(size[0].factor):
        return size[0].factor
    return [[*term] if term.divisor > 1 else [*term[:-1]] for term in size]


def _plain_shape(shape: Iterable[Size]) -> list[Any]:
    return [_plain_size(dim) for dim in shape]


def _plain_buffer(one: TracedBuffer) -> list[Any]:
    return [one.name, _plain_shape(one.shape), one.dtype.name, _plain_size(one.n_bytes), one.kind]


def _plain_computation(one: Computation) -> list[Any]:
    """Its values; without the FLOPs where they follow from operands."""
    row = [one.kind.value, [*map(_plain_shape, one.operands)], _plain_shape(one.shape), one.dtype]
    return row if one.operands else [*row, _plain_size(one.flops)]


def _plain_recording(recording: Recording, tables: _Tables) -> dict[str, Any]:
    """A recording as plain values, of what is shared the indices in the growing tables."""
    return {
        "buffers": [_index(one, tables.buffers) for one in recording.buffers],
        "parts": {
            part: [_plain_event(event, tables) for event in events]
            for part, events in recording.parts.items()
        },
        "boundary": [recording.boundary, recording.boundary_grad, recording.entry_requires_grad],
        "cut": recording.cut,
        "ends": recording.ends,
    }


def _index(value: Hashable, table: dict[Any, int]) -> int:
    """The place of a value in a table, at whose end it is put if it is new."""
    return table.setdefault(value, len(table))


def _plain_event(event: TracedEvent, tables: _Tables) -> Any:
    """A buffer that comes is its number, one that goes is -1 less its number, one that is added to a list."""
    match event.kind:
        case "alloc":
            return event.buffer
        case "free":
            return -1 - event.buffer
        case "add":
            return [event.buffer]
        case "grad":
            return [event.buffer, event.parameter]
        case "kernel":
            return [event.kernel, event.n_results, _plain_shape(event.shape), event.dtype]
        case "workspace":
            return [event.kind, _index(event, tables.convolutions)]
        case "collective":
            return [[event.phase, event.kernel, event.axis], _plain_shape(event.shape), event.dtype]
        case "hook":
            return [event.kernel, [*event.parameters]]
        case "module":
            return [event.kernel, event.parameter, [*event.parameters]]
    return [event.phase, _index(event.computation, tables.computations)]
