"""PEFT's adapters merged into their weights, as TRL's GRPOTrainer does before it sends weights to a server.

Each product of two adapters is added to its frozen weight, and once all weights are sent it is subtracted.
Weights and adapters that FSDP2 shards are DTensors: PyTorch chooses how their products are divided.

Neglects: the time of products; narrower copies on CPU.
Source: trl.generation.vllm_generation (`VLLMGeneration._iter_named_params`), 1.16;
`peft.tuners.lora.layer:Linear.merge`, `peft.tuners.lora.layer:Linear.unmerge`.
"""

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from memplan.engines.torch.dtensor import BETWEEN_HOSTS, COLUMNS, ROWS, WHOLE, DTensor, strategy
from memplan.errors import MissingRule
from memplan.record import Alloc, Collective, CollectiveKind, Event, Free, allocs, frees
from memplan.shapes import Buffer, DType, Parameter, Shape, buffer_of

BASE: Final = ".base_layer.weight"
FIRST, SECOND = ".lora_A.default.weight", ".lora_B.default.weight"
PREFIX: Final = "lora_"
"""In the names of parameters that no server gets (`PeftModel.prefix`)."""

ORIGINAL: Final = "original_module"
"""In the names of frozen weights whose trained copies a server gets."""


class Adapted(NamedTuple):
    """A frozen weight (rows, columns), and its adapters (r, columns) and (rows, r), over n ranks."""

    name: str
    shape: Shape
    r: int
    weight: DType
    adapters: DType
    n_ranks: int

    @property
    def rows(self) -> int:
        """Rows of each rank's part, as FSDP2 pads it."""
        return -(-self.shape[0] // self.n_ranks)


def is_sent(name: str) -> bool:
    """Whether a server gets the parameter of this name."""
    return PREFIX not in name and ORIGINAL not in name


def adapted(stored: Iterable[tuple[Parameter, DType]], n_ranks: int) -> Iterator[Adapted]:
    """The weights with adapters, of parameters and the types they are stored in."""
    base = first = None
    for one, dtype in stored:
        if one.name.endswith(BASE):
            base = one, dtype
        elif one.name.endswith(FIRST):
            first = one
        elif one.name.endswith(SECOND) and base is not None and first is not None:
            name = base[0].name.removesuffix(BASE)
            yield Adapted(name, base[0].whole_shape, first.whole_shape[0], base[1], dtype, n_ranks)


def merged(one: Adapted) -> Iterator[Event]:
    """The product is made and added to the weight."""
    products, delta, is_term = _delta(one)
    yield from products
    if is_term:
        yield from _scattered(one, one.adapters)
    yield Free(delta)


def unmerged(one: Adapted) -> Iterator[Event]:
    """The product is made again and subtracted, in the weight's own type."""
    products, delta, is_term = _delta(one)
    yield from products
    narrow = [buffer_of(f"{delta.name} (narrow)", delta.shape, one.weight)] * (one.weight != one.adapters)
    yield from allocs(*narrow)
    if is_term:
        yield from _scattered(one, one.weight)
    yield from frees(*narrow, delta)


def _delta(one: Adapted) -> tuple[list[Event], Buffer, bool]:
    """The events of the product, the scaled product, and whether each rank has a term of it and not rows."""
    copies, shape, is_term = _operands(one)
    found, read = copies
    product = buffer_of(f"{one.name} (product of adapters)", shape, one.adapters)
    scaled = buffer_of(f"{one.name} (scaled product of adapters)", shape, one.adapters)
    return [*found, Alloc(product), *frees(*read), Alloc(scaled), Free(product)], scaled, is_term


def _operands(one: Adapted) -> tuple[tuple[list[Event], list[Buffer]], Shape, bool]:
    """The events that redistribute adapters with the copies made, the local shape of their product, its kind.

    Assumes: ranks on several hosts. Where one process sees the GPUs of all ranks PyTorch counts on faster
    links, and may gather the first adapter where here columns of the second one are exchanged.

    Source: `torch.distributed.tensor:Shard` (`_to_replicate_tensor`, `_to_new_shard_dim`).

    Raises:
        MissingRule: for other placements than these.
    """
    (rows, columns), n, r = one.shape, one.n_ranks, one.r
    if n == 1:
        return ([], []), one.shape, False
    sizes = (n,)
    operands = [
        DTensor(one.name, shape, (ROWS,), sizes, buffer_of(one.name, shape, one.adapters), dtype=one.adapters)
        for shape in ((rows, r), (r, columns))
    ]
    _, (second,), (first,) = strategy(operands, (BETWEEN_HOSTS,))
    each = -(-r // n)
    if (second, first) == (ROWS, WHOLE):
        whole = buffer_of(f"{one.name} (first adapter)", (n * each, columns), one.adapters)
        return ([Alloc(whole), _sent("all_gather", whole)], [whole]), (one.rows, columns), False
    if (second, first) == (COLUMNS, ROWS):
        sent = buffer_of(f"{one.name} (second adapter by rank)", (one.rows, n * each), one.adapters)
        held = buffer_of(f"{one.name} (columns of the second adapter)", (n * one.rows, each), one.adapters)
        return ([Alloc(sent), Alloc(held), _sent("all_to_all", sent), Free(sent)], [held]), one.shape, True
    raise MissingRule(
        f"trainer='grpo' with lora_rank={r} over {n} ranks: the product of the adapters of {one.name} has no "
        "rule, as both are redistributed; use another dp.",
        kind="GRPOTrainer's merge of adapters with both redistributed",
    )


def _scattered(one: Adapted, dtype: DType) -> Iterator[Event]:
    """The sum of all ranks' terms, of which each rank gets its rows; uneven ones are padded in a copy."""
    padded = buffer_of(f"{one.name} (padded product)", (one.n_ranks * one.rows, one.shape[1]), dtype)
    copies = [padded] * (padded.shape != one.shape)
    own = buffer_of(f"{one.name} (rows of the product)", (one.rows, one.shape[1]), dtype)
    yield from (*allocs(*copies, own), _sent("reduce_scatter", padded), *frees(*copies, own))


def _sent(kind: CollectiveKind, what: Buffer) -> Collective:
    return Collective(kind=kind, axis="dp", what="merge of adapters", payload_bytes=what.n_bytes)
