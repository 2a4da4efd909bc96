"""Megatron's parameter and gradient buffers, and its optimizers' states, of one rank.

A model chunk's weights are laid out in one buffer in the reverse of the module's order, cut into buckets. The
distributed optimizer gives each data-parallel rank an equal part of each bucket.

Source: megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBuffer,
megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._compute_per_buffer_param_layout.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import lcm
from typing import Final, NamedTuple

from memplan.engines.megatron.options import MegatronOptions
from memplan.mesh import Group
from memplan.models.megatron import WORDS
from memplan.optimizers import KEPT
from memplan.shapes import BF16, FP16, FP32, INT16, Buffer, DType, Parameter, buffer_of

PARAM_ALIGNMENT: Final = 64
"""A weight begins at a multiple of so many elements (`pad_param_start`)."""

BUCKET_ALIGNMENT: Final = 128
"""A bucket ends at a multiple of this and of the data-parallel ranks (`pad_bucket_end`)."""

USUAL_BUCKET: Final = 40_000_000
"""The least elements of a bucket (`DistributedDataParallel`: `bucket_size`)."""

USUAL_BUCKET_PER_RANK: Final = 1_000_000
"""The elements of a bucket for each data-parallel rank, if that is more."""


class Bucket(NamedTuple):
    """A bucket's place in its buffer, and the place of each of its weights, in elements."""

    start: int
    end: int
    parameters: tuple[tuple[Parameter, int, int], ...]

    @property
    def n_elements(self) -> int:
        """Its elements, padding included."""
        return self.end - self.start

    @property
    def unpadded(self) -> int:
        """The elements of its weights."""
        return sum([end - start for _, start, end in self.parameters])

    def shard(self, rank: int, n_ranks: int) -> Iterator[tuple[Parameter, int]]:
        """The weights of which a data-parallel rank has a part, and the part's elements.

        Source: megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._build_model_gbuf_range.
        """
        size = self.n_elements // n_ranks
        first, last = self.start + rank * size, self.start + (rank + 1) * size
        for parameter, start, end in self.parameters:
            n = min(end, last) - max(start, first)
            if n > 0:
                yield parameter, n


def padded(n: int, multiple: int) -> int:
    """The least multiple that is at least n."""
    return -(-n // multiple) * multiple


def buckets_of(
    parameters: Sequence[Parameter], bucket_size: int | None, n_ranks: int, shared: frozenset[Parameter]
) -> list[Bucket]:
    """The buckets of the distributed optimizer: a shared embedding has one of its own.

    `bucket_size`: the elements from which on a bucket ends; None: one bucket. `shared`: the word embeddings
    that the first and the last stage share.

    >>> from memplan.shapes import BF16
    >>> a, b = Parameter("a", (100,), BF16), Parameter("b", (30,), BF16)
    >>> [(bucket.start, bucket.end) for bucket in buckets_of([a, b], None, 2, frozenset())]
    [(0, 256)]
    """
    found: list[Bucket] = []
    own: list[tuple[Parameter, int, int]] = []
    at = start = 0

    def finish(end: int) -> int:
        end = padded(end, lcm(n_ranks, BUCKET_ALIGNMENT))
        found.append(Bucket(start, end, tuple(own)))
        own.clear()
        return end

    for parameter in reversed(parameters):
        at = padded(at, PARAM_ALIGNMENT)
        if parameter in shared and own:
            at = start = finish(at)
        end = at + parameter.n_elements
        own.append((parameter, at, end))
        at = end
        if parameter in shared or (bucket_size is not None and end - start >= bucket_size):
            at = start = finish(end)
    if own:
        finish(at)
    return found


class ChunkStates(NamedTuple):
    """What a rank keeps of one model chunk, in the order in which it is allocated.

    Attributes:
        group: the ranks that reduce the gradients, and between which the distributed optimizer divides them.
        weights: as the modules make them; `param_data`: the buffer that replaces them, if any.
        grad_data: the contiguous gradients, into which each `main_grad` is a view.
        main_params: in float32; none of float32 weights.
        moments: of the optimizer.
    """

    group: Group
    weights: tuple[Buffer, ...]
    param_data: Buffer | None
    grad_data: Buffer
    main_params: tuple[Buffer, ...]
    moments: tuple[Buffer, ...]

    @property
    def kept(self) -> Iterator[Buffer]:
        """What is alive between steps."""
        yield from self.weights if self.param_data is None else (self.param_data,)
        yield from (self.grad_data, *self.main_params, *self.moments)


Owned = Sequence[tuple[Parameter, int]]
"""The weights of which a rank updates some elements, and how many."""


class StateTypes(NamedTuple):
    """The types of `main_grad`, of the main parameters (None: float32 weights have none), and of the moments.

    `others`: AdamW's moments, of the weights that Muon does not update. `is_precise`: Transformer Engine's
    FusedAdam has the main parameters among its states, of which it keeps the 16 bits that bfloat16 weights
    lack (`store_param_remainders`).
    """

    grads: DType
    main: DType | None
    moments: Mapping[str, DType]
    others: Mapping[str, DType]
    is_precise: bool


def state_types(params_dtype: DType, optimizer: str, options: MegatronOptions) -> StateTypes:
    """The types of an optimizer's states: float32, but for what is asked for, and gradients under fp16."""
    is_precise = options.use_precision_aware_optimizer
    narrow = params_dtype == FP16 and not options.accumulate_allreduce_grads_in_fp32
    grads = params_dtype if narrow or options.main_grads_dtype == "bf16" else FP32
    of_main = INT16 if is_precise and params_dtype == BF16 else FP32
    moments, others = (
        {name: options.moments.get(name, FP32) for name in names}
        for names in (KEPT[optimizer].moments, KEPT[optimizer].others or KEPT[optimizer].moments)
    )
    return StateTypes(
        grads,
        None if params_dtype == FP32 else of_main,
        moments,
        others,
        is_precise,
    )


def chunk_states(
    parameters: Sequence[Parameter], types: StateTypes, owned: Owned, group: Group, n_padded: int | None
) -> ChunkStates:
    """The states of a chunk with these weights, of which the rank updates the owned ones.

    `n_padded`: the elements of the buffer that replaces the weights; None: they stay as they are.

    Source: megatron.core.optimizer.optimizer:Float16OptimizerWithFloat16Params,
    megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._build_model_and_main_param_groups.
    """
    weights = tuple([buffer_of(p.name, p.shape, p.dtype, "weights") for p in parameters])
    dtype = parameters[0].dtype
    param_data = None if n_padded is None else buffer_of("param_data", (n_padded,), dtype, "weights")
    n_elements = sum([p.n_elements for p in parameters]) if n_padded is None else n_padded
    main = [buffer_of(f"{p.name}.main_param", (n,), types.main, "optimizer") for p, n in owned if types.main]
    moments = [
        buffer_of(f"{p.name}.{name}", (n,), dtype, "optimizer")
        for p, n in owned
        for name, dtype in (types.moments if is_orthogonalized(p) else types.others).items()
    ]
    if types.is_precise:
        main, moments = [], main + moments
    return ChunkStates(
        group,
        weights,
        param_data,
        buffer_of("grad_data", (n_elements,), types.grads, "grads"),
        tuple(main),
        tuple(moments),
    )


def is_orthogonalized(parameter: Parameter) -> bool:
    """Whether Muon updates a weight: matrices but the word embeddings' and the output layer's.

    Source: megatron.core.optimizer.emerging_optimizers:_is_nonlinear_or_embedding.
    """
    return len(parameter.shape) == 2 and parameter.name not in (WORDS, "output_layer.weight")
