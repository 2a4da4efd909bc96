"""`memplan.trace`: a module's forward and backward pass on tensors without data, as a model to plan with."""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import groupby, islice, product
from math import gcd, isqrt
from threading import RLock
from typing import Any, Final, NamedTuple, cast, get_args
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from torch.utils.checkpoint import _StopRecomputationError, checkpoint

from memplan.checks import checked_choice, checked_count
from memplan.device import DeviceType
from memplan.errors import InvalidValue, MemplanError, MissingRule, reason, shown_value, unknown_name
from memplan.mesh import DIVIDING, Group, degrees_text
from memplan.models.base import BLOCKS, Layers
from memplan.models.recording import (
    AGAIN,
    MODULE,
    RECOMPUTES,
    ROTATES,
    ULYSSES,
    UNITS,
    Compiles,
    Ends,
    Placed,
    Recording,
    Term,
    TracedKind,
    TracedTensor,
    Variant,
)
from memplan.models.trace_from_json import check_balance
from memplan.models.traced import TracedModel, modules_with
from memplan.record import HookKind
from memplan.tracing.autotp import communicating, divided_shape
from memplan.tracing.cache import no_collection, setting, without_logs_of_failures
from memplan.tracing.compiled import compiled, compiling
from memplan.tracing.context import chosen_for_dtensors, divided_sequences
from memplan.tracing.cuda import CUDA, NotRun, without_a_gpu
from memplan.tracing.divided import (
    Parallelize,
    axes_of,
    dealt_out,
    divided,
    is_of_experts,
    local,
    own_plan,
    placed,
    windows_of,
    wrapped,
)
from memplan.tracing.example import Example, Loss, Stack, checked_example, stacks_of, structure_of
from memplan.tracing.recorder import GIVEN, WEIGHT, Recorder, Section, Unit, Unlike
from memplan.tracing.shapes import Shapes, dtype_name, tensors
from memplan.tracing.ulysses import exchanging_heads
from memplan.tracing.units import OfOneSize, Parts, Point, parts_of, recording_of, shape_of
from memplan.tracing.values import UnknownValue, known_value, make_known
from memplan.tracing.zero3 import hooked_module, linears

RUNS: Final[Mapping[str, tuple[tuple[str, str], ...]]] = {
    "fp32": (("float32", ""),),
    **dict.fromkeys(("bf16", "bf16-reduce-fp32"), (("bfloat16", ""),)),
    "bf16-autocast": (("bfloat16", "bfloat16"),),
    **dict.fromkeys(("bf16-mixed", "bf16-mixed-reduce-bf16"), (("float32", "bfloat16"), ("bfloat16", ""))),
    "fp16-mixed": (("float32", "float16"), ("float16", "")),
}
"""Types of weights and of autocast that a plan's precision runs in; mixed ones under DDP and under FSDP2."""

USUAL: Final = ("fp32", "bf16", "bf16-mixed")
"""The precisions that are traced unless others are named."""

BATCHES: Final = (2, 3, 5)
"""Batches that are traced, for each variant; the third checks the rules of sizes that two give.

With the lengths they make all products of powers of both different, so that sizes tell them apart.
"""

LENGTHS: Final = (48, 80, 112)
"""Sequences that are traced where the example is longer: short, so that masks can be computed."""

FEW: Final = 4
"""Blocks that are enough for a trace: the first two, one that stands for the others, the last."""

LEAST_LENGTH: Final = 4
"""The shortest sequence of an example, as three lengths are traced."""

MOST_MASKED: Final = 1 << 20
"""Elements of the largest mask with which rules of sizes are checked."""

ADD_IN_PLACE: Final = ("linear", "scaled_dot_product_attention")
"""Functions of `torch.nn.functional` that add a bias or a mask in place (`Recorder.adds_in_place`)."""

FLAG: Final = "gradient_checkpointing"
"""Of transformers' modules whether blocks are recomputed: of a layer by its class, of others by their own."""

POSITIONS: Final = "rope_deltas"
"""What modules of transformers keep of a step where `mm_token_type_ids` say which tokens are images.

Source: transformers.models.qwen2_vl.modeling_qwen2_vl (`Qwen2VLModel.compute_3d_position_ids`).
"""

HOOK: Final = "fsdp_post_all_gather"
"""The attribute of a parameter that FSDP2 gathers in another way than others, here torchao's in float8."""

ONE_THREAD: Final = partial(setting, torch.get_num_threads, torch.set_num_threads, 1)
"""A block in which a mask is not divided among threads, which takes longer than to compute it."""

ONE_AT_A_TIME: Final = RLock()
"""Held while a module is traced, as what is changed in PyTorch for it is changed for all threads."""

NEEDS_VALUES: Final = (UnknownValue, DataDependentOutputException, DynamicOutputShapeException)
"""The errors raised where an unknown value is needed."""


def trace(
    module: nn.Module,
    example_inputs: Any,
    *,
    loss: Loss | None = None,
    targets: Tensor | None = None,
    blocks: str | Sequence[str] | None = None,
    sequence: Sequence[str | int] | None = None,
    precisions: Sequence[str] = USUAL,
    max_seq_len: int | None = None,
    name: str = "",
    device: DeviceType = "cuda",
    executed: bool = False,
    mesh: Mapping[str, int] | None = None,
    parallelize: Parallelize | None = None,
    cp_ranks: Sequence[int] = (0,),
    zero3: bool = False,
) -> TracedModel:
    """The module as a model to plan with: `memplan.estimate(memplan.trace(module, inputs), zero=3, dp=8)`.

    Nothing is computed, unless it is `executed`. The module is left as it was; its weights may be on the
    `meta` device. The first dim of each input is the batch; the second is the sequence in those of integers
    that all have the same, or in those that `sequence` names. Sizes are known for any batch and length, where
    they follow from rules that runs at several sizes agree on.

    Args:
        module: the module; parameters that do not require a gradient are frozen.
        example_inputs: what it is called with: a tensor, a tuple, or a dict of keywords.
        loss: from its output (and `targets`) to the loss; left out, the output's `loss`, the output itself
            if it is a single number, or cross-entropy with the targets.
        targets: what the loss compares with.
        blocks: the path of the list of blocks, as "model.layers", or of several lists, as
            "encoder.layers,decoder.layers"; "" for none. Left out, what transformers says to wrap; else all
            lists of blocks of one class; else the list with the most parameters whose blocks are equal.
        sequence: names (or places) of the inputs whose second dim is the sequence.
        precisions: those to trace for: any of memplan's own.
        max_seq_len: the usual length of sequences; left out, the configuration's, or the example's.
        name: what to call it; left out, its class.
        device: whose kernels to trace, "cuda" or "cpu"; no GPU is needed. A trace for "cuda" is of GPUs from
            compute capability 8.0 on; what their kernels allocate for themselves follows from rules, when the
            GPU is known.
        executed: run the passes on the current GPU, with weights of any values. What is traced holds for that
            GPU and for the example's sizes, and with cuDNN's workspaces, for which there are no rules.
        mesh: the ranks over which the module is divided, as {"tp": 8}, or {"tp": 2, "ep": 8}, of which 2 in a
            row are tensor-parallel; the trace is of the first of them, and for these degrees only. With
            "cp", inputs that have a sequence are divided by PyTorch's `context_parallel`, and the module
            calls `scaled_dot_product_attention(..., is_causal=True)`. The module is given undivided.
        parallelize: what divides it, called with the module and a `DeviceMesh` of these axes (with "ep", a
            dict of one for each): of the modules of transformers left out (their own plan), else a function
            around `parallelize_module`, say.
        cp_ranks: the places along cp whose passes are recorded; left out, the first one's. Others differ
            where attention to half of the keys, or of half of the queries, takes the place of the whole.
        zero3: trace it as DeepSpeed's ZeRO-3 runs it, and for nothing else: with the hooks of each module.

    Raises:
        InvalidValue: for a module or an example that cannot be used, and why.
        MissingRule: for a module whose passes depend on values of floats.
    """
    ranks = checked_mesh(mesh or {})
    if executed and ranks:
        raise InvalidValue(
            f"executed=True runs the module on one GPU, and mesh={shown_value(ranks)} divides it; leave one "
            "of them out."
        )
    if zero3 and (executed or ranks):
        raise InvalidValue("zero3=True is traced without a GPU, on one rank; leave out executed and mesh.")
    runs_on = _checked_device(device, executed=executed)
    example = checked_example(module, example_inputs, loss, targets, sequence)
    if any(
        min(LENGTHS) < size <= example.point[1]
        for size in windows_of(getattr(module, "config", None)).values()
    ):
        example = replace(example, is_of_one_size=True)  # shorter ones do not reach its window
    return traced(
        example,
        runs_on,
        blocks,
        precisions,
        max_seq_len,
        name,
        executed=executed,
        mesh=ranks,
        parallelize=parallelize,
        cp_ranks=cp_ranks,
        zero3=zero3,
    )


def traced(
    example: Example,
    runs_on: torch.device,
    blocks: str | Sequence[str] | None = None,
    precisions: Sequence[str] = USUAL,
    max_seq_len: int | None = None,
    name: str = "",
    *,
    executed: bool = False,
    any_length: bool = False,
    mesh: Mapping[Group, int] | None = None,
    parallelize: Parallelize | None = None,
    cp_ranks: Sequence[int] = (0,),
    zero3: bool = False,
    of_deepspeed: bool = False,
    compiles: Compiles | None = None,
    experts_within: bool = False,
) -> TracedModel:
    """The model of an example; where it is for `any_length`, one of the example's own length is refused.

    `mesh`, `parallelize`, `cp_ranks`, `zero3`: as of `trace`, checked. `of_deepspeed`: the mesh's ranks
    are DeepSpeed's: those along cp exchange heads, and AutoTP divides over those along tp. `compiles`: how
    blocks are compiled; None: they are not. `experts_within`: FSDP2 alone trains the module, and experts are
    within the units of their blocks, as torchtitan has it; else they are units of their own, and tokens are
    dealt out to them.

    Raises:
        MemplanError: as `trace`.
    """
    cp = (mesh or {}).get("cp", 1)
    if compiles:
        example = example.at((compiles.micro_batch, compiles.seq_len))
    _check_sequences(example, cp)
    with ONE_AT_A_TIME:
        found = [
            _traced(
                example,
                runs_on,
                blocks,
                precisions,
                max_seq_len,
                name,
                executed=executed,
                any_length=any_length,
                mesh=mesh or {},
                parallelize=parallelize,
                cp_rank=checked_count("cp_ranks", place, least=0, most=cp - 1),
                zero3=zero3,
                of_deepspeed=of_deepspeed,
                compiles=compiles,
                experts_within=experts_within,
            )
            for place in dict.fromkeys(cp_ranks)
        ]
    recordings = {run: own for one in found for run, own in one.recordings.items()}
    model = replace(found[0], recordings=recordings)
    try:
        check_balance(model)
    except InvalidValue as error:
        raise MissingRule(
            f"{model.name} does something in its passes that no trace says ({error.args[0]}); trace it with "
            "other inputs, or without what hands tensors on from block to block.",
            kind="a module whose trace does not free what it allocates",
        ) from error
    return model


def _traced(
    example: Example,
    runs_on: torch.device,
    blocks: str | Sequence[str] | None,
    precisions: Sequence[str],
    max_seq_len: int | None,
    name: str,
    *,
    executed: bool,
    any_length: bool,
    mesh: Mapping[Group, int],
    parallelize: Parallelize | None,
    cp_rank: int,
    zero3: bool,
    of_deepspeed: bool,
    compiles: Compiles | None,
    experts_within: bool,
) -> TracedModel:
    """The model of an example as the rank at this place along cp runs it."""
    eager = not (compiles or experts_within or _has_hooks(example.module))
    narrow = zero3 or of_deepspeed
    float32_last = "cp" in mesh or example.is_of_one_batch
    runs = _checked_runs(precisions, autocasts=eager, of_deepspeed=narrow, float32_last=float32_last)
    shapes, plays_cuda = Shapes(), runs_on == CUDA and not executed
    why = ""
    with ExitStack() as stack:
        for block in (no_collection(), without_logs_of_failures(), ONE_THREAD()):
            stack.enter_context(block)
        played = stack.enter_context(without_a_gpu()) if plays_cuda else nullcontext()
        ranks = Ranks({}, {}, played)
        if mesh:
            divides = parallelize or own_plan(example.module, mesh)
            module, own = stack.enter_context(divided(example.module, mesh, divides, runs_on, cp_rank))
            context = Context(own["cp"], cp_rank) if "cp" in mesh else None
            if of_deepspeed and context is None:
                stack.enter_context(communicating(own["tp"]))
            ranks = Ranks(mesh, axes_of(own, mesh), played, context, of_deepspeed)
            example = replace(example, module=module)
        for stacks in stacks_of(example.module, blocks):
            made = partial(
                _Tracer,
                example,
                stacks,
                shapes,
                runs_on,
                ranks,
                compiles,
                executes=executed,
                any_length=any_length,
                zero3=zero3,
                experts_within=experts_within,
            )
            try:
                return _model(*_recorded(made, runs), name, max_seq_len)
            except Unlike as unlike:
                why = str(unlike)
    raise InvalidValue(f"blocks={blocks!r} are no units ({why}); leave blocks out.")


def _checked_runs(
    precisions: Sequence[str], *, autocasts: bool, of_deepspeed: bool, float32_last: bool
) -> list[tuple[str, str]]:
    """The runs of these precisions: the types of weights and of autocast, if that is traced.

    Those in float32 come last where fewer attention kernels take it, or more kinds of blocks are without it.
    """
    if isinstance(precisions, str) or not precisions:
        raise InvalidValue(
            f"precisions={shown_value(precisions)} is not allowed; use a list of some of {', '.join(RUNS)}."
        )
    runs = dict.fromkeys(run for precision in precisions for run in _runs(precision))
    if not autocasts:
        runs = dict.fromkeys([run for run in runs if not run[1]])
    if float32_last:
        runs = dict.fromkeys(sorted(runs, key=lambda run: (run[0] == "float32", not run[1])))
    if of_deepspeed:
        runs = {run: None for run in runs if not run[1] and run[0] != "float32"}
    if of_deepspeed and not runs:
        raise InvalidValue(
            f"precisions={shown_value(precisions)} have no weights in 16 bits, which DeepSpeed has; use "
            "'bf16-mixed' or 'fp16-mixed'."
        )
    if not runs:
        raise InvalidValue(
            f"precisions={shown_value(precisions)} run under autocast, which is not traced of compiled "
            "blocks and of experts over expert-parallel ranks; use 'bf16-mixed' or 'bf16'."
        )
    return list(runs)


def checked_mesh(mesh: Mapping[str, int]) -> dict[Group, int]:
    """The ranks along the axes with several.

    Raises:
        InvalidValue: an axis over which no module is divided here, or no number of ranks.
    """
    for axis in mesh:
        if axis not in DIVIDING:
            raise unknown_name("axis of a mesh that a module is divided over", axis, DIVIDING)
    found = {axis: n for axis, n in mesh.items() if checked_count(axis, n) > 1}
    tp, ep = found.get("tp", 1), found.get("ep", 0)
    if ep % tp:
        raise InvalidValue(
            f"mesh={shown_value(found)}: ep={ep} is not a multiple of tp={tp}, though ranks of one tensor "
            f"group hold one batch; use {tp * -(-ep // tp)}."
        )
    if ep and "cp" in found:
        raise InvalidValue(
            f"mesh={shown_value(found)}: expert- and context-parallel ranks have no rule together yet; leave "
            "one of them out."
        )
    return found


def _check_sequences(example: Example, cp: int) -> None:
    """Raise if the example's sequences cannot be divided over context-parallel ranks.

    Source: `torch.distributed.tensor.experimental._context_parallel._load_balancer:_HeadTailLoadBalancer`.
    """
    if cp == 1:
        return
    if not example.has_sequence:
        raise InvalidValue(
            f"cp={cp} divides sequences, and no input has one; name those that do by sequence=[...]."
        )
    if example.point[1] % (2 * cp):
        raise InvalidValue(
            f"the example's sequence has {example.point[1]} tokens, and context_parallel cuts it into "
            f"2 x cp = {2 * cp} equal pieces; give one of {-(-example.point[1] // (2 * cp)) * 2 * cp}."
        )


def _checked_device(asked: str, *, executed: bool) -> torch.device:
    checked_choice("device", asked, get_args(DeviceType))
    if asked == "cpu" and executed:
        raise InvalidValue("executed=True runs the module on a GPU; use device='cuda', or leave it out.")
    if asked == "cpu":
        return torch.device("cpu")
    if not executed:
        return CUDA
    if not torch.cuda.is_available():
        raise InvalidValue(
            "executed=True: PyTorch sees no GPU here; leave it out, or use a machine with one."
        )
    return torch.device("cuda", torch.cuda.current_device())


def _runs(precision: str) -> tuple[tuple[str, str], ...]:
    if precision not in RUNS:
        raise unknown_name("precision to trace", precision, RUNS)
    return RUNS[precision]


# --- Runs ---


class _PartlyUsed(Unlike):
    """Of parameters of one name in several blocks some get no gradient: `without_grad`."""

    def __init__(self, why: str, without_grad: frozenset[str]) -> None:
        super().__init__(why)
        self.without_grad = without_grad


class _Finer(Exception):
    """Blocks that were of one kind in earlier runs are of several."""


class Context(NamedTuple):
    """The context-parallel ranks, and the place of the one that runs."""

    ranks: DeviceMesh
    cp_rank: int

    def dividing(
        self, module: nn.Module, sequences: Sequence[Tensor], rotate: str
    ) -> AbstractContextManager[Any]:
        """A block in which a module runs on its own pieces of these sequences."""
        if rotate == ULYSSES:
            return exchanging_heads(module, self.ranks)
        return divided_sequences(self.ranks, sequences, rotate)


class Ranks(NamedTuple):
    """The ranks that a module is divided over: how many along each axis, and the axes by their groups' names.

    `within`: what its modules that hold DTensors run in; `context`: the ranks that divide its sequences;
    `of_deepspeed`: they are DeepSpeed's.
    """

    mesh: Mapping[Group, int]
    groups: Mapping[str, Group]
    within: AbstractContextManager[Any]
    context: Context | None = None
    of_deepspeed: bool = False

    @property
    def rotates(self) -> tuple[str, ...]:
        """The ways of handing keys and values around."""
        if self.context is None:
            return ("",)
        return (ULYSSES,) if self.of_deepspeed else ROTATES

    @property
    def cp(self) -> int:
        """The ranks that divide a sequence."""
        return self.mesh.get("cp", 1)

    @property
    def n_given(self) -> int:
        """How many ranks' pieces of a sequence each is given: all, or its own by DeepSpeed's data loader."""
        return self.cp if self.rotates == ROTATES else 1


class _Tracer:
    """Runs a module with its blocks in stacks.

    The first run goes through all blocks and tells their kinds. Where a run through the first few of each
    stack is recorded as the same, those after it go through no more.
    """

    def __init__(
        self,
        example: Example,
        stacks: Sequence[Stack],
        shapes: Shapes,
        device: torch.device,
        ranks: "Ranks",
        compiles: Compiles | None,
        *,
        executes: bool,
        any_length: bool,
        zero3: bool,
        experts_within: bool,
        without_grad: frozenset[str] = frozenset(),
    ) -> None:
        """Blocks differ that have parameters of one name, of which some get no gradient: `without_grad`."""
        self.ranks = ranks
        self.example = example
        self.stacks = stacks
        self.shapes = shapes
        self.device = device
        self.executes = executes
        self.zero3 = zero3
        self.experts_within = experts_within
        self.compiles = compiles
        self.any_length = any_length and example.has_sequence
        self.units = {block: unit for stack in stacks for block, unit in _units_of(stack, without_grad)}
        self.paths = {unit.path: unit for unit in self.units.values()}
        self.inside = tuple([f"{path}." for path in self.paths])
        self.names = _common_names(example.module, self.units.values(), without_grad)
        before, after = self.outside()
        every = [name for name, _ in example.module.named_parameters()] if example.apart else []
        apart = [name for name in every if name.startswith(f"{example.apart}.")]
        self.apart = list(dict.fromkeys(map(self.common, apart)))
        """The names of the parameters of what FSDP2 shards as a module of its own."""
        of_head = {name: parameter for name, parameter in after.items() if name not in apart}
        self.ends = {"embed": before, "head": of_head} if stacks else {}
        _check_hooks([*before.items(), *after.items()])
        self.neglected: dict[str, None] = {}
        """Operations whose workspaces are not recorded, in any run."""
        self.lacks: dict[str, None] = {}
        """Packages that are not installed, for which transformers' own code ran, in any run."""
        self.grads_placed: dict[str, Placed] = {}
        """The placements of the gradient of each parameter that is a DTensor."""
        self.unused: frozenset[str] | None = None
        """The parameters that require a gradient and get none, in every run; None before the first."""
        self.whole: Parts | None = None
        """What the last run through all blocks did."""
        self.held: list[Tensor] = []
        """The loss, where the loop holds it to the end of the backward pass."""
        self._few: Mapping[Stack, int] | None = None
        """How many blocks of each stack are run; all of one that is not named."""
        self._last: tuple[Point, Variant, Parts] | None = None
        self._other: tuple[Point, Variant, Parts] | tuple[()] = ()
        """The last run under other units of FSDP2."""

    def outside(self) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
        """The parameters before the first block and all others that are no block's, in the module's order."""
        before: dict[str, nn.Parameter] = {}
        after: dict[str, nn.Parameter] = {}
        own = before
        for name, parameter in self.example.module.named_parameters():
            if any(name.startswith(f"{path}.") for path in self.paths):
                own = after
            else:
                own[name] = parameter
        return before, after

    def of_unit(self, unit: Unit) -> dict[str, nn.Parameter]:
        """The parameters of a block, named with a * for its number."""
        if unit.role == "between":
            return {}
        owned = self.example.module.get_submodule(unit.path).named_parameters(unit.path)
        return {self.common(name): parameter for name, parameter in owned}

    def common(self, name: str) -> str:
        """A name in the module, with a * for a block's number."""
        return self.names.get(name, name)

    def run(self, point: Point, variant: Variant) -> Parts:
        """One forward and backward pass.

        Raises:
            MissingRule: what happens depends on values that are not known.
        """
        if self._other and self._other[:2] == (point, variant):
            parts = self._other[2]
        else:
            parts = self._of_first_blocks(partial(self._run, point, variant))
        self._last = point, variant, parts
        return parts

    def differs(self, units: str) -> bool:
        """Whether something else than in the last run happens under these units of FSDP2, if they can be."""
        if self._last is not None:
            point, variant, parts = self._last
            if units == "block+ends" and not isinstance(parts.ends, Ends):
                return False
            with suppress(MemplanError, Unlike):
                other = variant._replace(units=units)
                found = self._of_first_blocks(partial(self._run, point, other))
                self._other = point, other, found
                return found != parts
        return False

    def _of_first_blocks(self, run: Callable[[Mapping[str, int]], Parts]) -> Parts:
        known = self.whole.labels if self.whole else {}
        if self._few:
            labels = _labels_of(self._few, known)
            with self._first_blocks(self._few):
                parts = run(labels)
            if not _are_finer(parts.labels, labels) and not _frees_in_one(parts):
                return parts
        if self.whole is None and self.executes:
            run(known)  # once, so that libraries have the memory that they keep
        whole = run(known)
        if self.whole and _are_finer(whole.labels, known):
            self.whole, self._few = whole, None
            raise _Finer
        if self._few is None:
            self.whole, self._few = whole, {}
            few = self._few_blocks(whole.labels)
            if any(n < len(stack.blocks) for stack, n in few.items()):
                with suppress(Exception), self._first_blocks(few):  # the module's code may need all of them
                    self._few = few if run(_labels_of(few, whole.labels)) == whole else {}
        return whole

    def _few_blocks(self, labels: Mapping[str, int]) -> dict[Stack, int]:
        """How many blocks of each stack are enough: several of each kind, and the last one for the last."""
        found: dict[Stack, int] = {}
        for stack in self.stacks:
            own = [labels.get(path, -1) for path in stack.blocks]
            structures = [self.paths[path].structure for path in stack.blocks]
            counts = Counter(own)
            for n in range(min(FEW, len(own)), len(own) + 1):
                kept = Counter([*own[: n - 1], own[-1]])
                ends = own[n - 1] == own[-1] or counts[own[-1]] == 1
                enough = all(kept[one] >= min(counts[one], FEW - (one != own[0])) for one in counts)
                if enough and ends and structures[n - 1] == structures[-1]:
                    found[stack] = n
                    break
        return found

    @contextmanager
    def _first_blocks(self, few: Mapping[Stack, int]) -> Iterator[None]:
        """Shortens the stacks to their first blocks."""
        with ExitStack() as stack:
            for one, n in few.items():
                owner = self.example.module.get_submodule(one.path)
                if len(owner._modules) == len(one.blocks):
                    first = dict(islice(owner._modules.items(), n))
                    stack.enter_context(patch.object(owner, "_modules", first))
            yield

    def _run(self, point: Point, variant: Variant, labels: Mapping[str, int]) -> Parts:
        recorder = Recorder(self.shapes, self.device, self.ranks.groups, executes=self.executes)
        weights, autocast, recompute, *_ = variant
        dtype = getattr(torch, weights)
        with _without_data(self.example.module, recorder, dtype) as parameters:
            inputs, targets, sequences = self._inputs(point, recorder)
            scale = _given(torch.ones(()), recorder) if "float16" in (weights, autocast) else None
            with ExitStack() as stack:
                if self.compiles:
                    stack.enter_context(compiling(recorder))
                for hook in self._hooks(parameters, recorder):
                    stack.callback(hook.remove)
                stack.enter_context(self._watched(recorder, variant))
                if recompute != "none" and not self.example.wraps_blocks:
                    stack.enter_context(_checkpointing(self.example.module))
                if variant.units == MODULE:
                    stack.enter_context(linears())
                recorder.events.clear()
                stack.enter_context(recorder)
                try:
                    if self.ranks.context:
                        if self.device == CUDA:
                            stack.enter_context(chosen_for_dtensors())
                        context = self.ranks.context.dividing(self.example.module, sequences, variant.rotate)
                        stack.enter_context(context)
                    self._step(recorder, inputs, targets, scale, weights, autocast)
                except NEEDS_VALUES as error:
                    raise _depends_on_values(recorder, error) from error
                except (MemplanError, Unlike):
                    raise
                except Exception as error:
                    if _has_no_kernel(error):
                        raise _without_kernel(recorder, error) from error
                    raise self._failed(recorder, error) from error
                self._note_unused(parameters)
        self.neglected |= recorder.neglected
        self.lacks |= recorder.lacks
        self._check_called(recorder)
        return parts_of(recorder, labels)

    def _failed(self, recorder: Recorder, error: Exception) -> "_Fails":
        """The error for code that fails."""
        why, where = f"{type(error).__name__}: {reason(error)}", _where(recorder)
        if self.ranks.mesh:
            return _Fails(
                f"{where} fails over {degrees_text(self.ranks.mesh)} ({why}); use other degrees, or one rank."
            )
        return _Fails(
            f"{where} fails as it is traced ({why}); give a module and an example that train, and code that "
            "reads no values of floats."
        )

    def _check_called(self, recorder: Recorder) -> None:
        """Raise if some blocks of a stack are called and others are not."""
        called, modules = {unit.path for unit in recorder.units}, {*self.example.module.modules()}
        blocks = [unit for module, unit in self.units.items() if module in modules]
        for stack in {unit.stack for unit in recorder.units} - {""}:
            left = [unit.path for unit in blocks if unit.stack == stack and unit.path not in called]
            if left:
                raise Unlike(f"{min(left)} is not called")

    def _step(
        self, recorder: Recorder, inputs: Any, targets: Any, scale: Tensor | None, weights: str, autocast: str
    ) -> None:
        """The passes; the loss is multiplied by the `scale` of a loss scaler, if there is one."""
        before = self.example.before
        with torch.autocast(self.device.type, getattr(torch, autocast)) if autocast else nullcontext():
            inputs = _cast(inputs, weights) if self.example.casts_inputs else inputs
            recorder.section = Section("forward", 0)
            if before is not None:
                before(**inputs)
            recorder.is_called, recorder.autocasts = True, bool(autocast)
            output = [self._output(recorder, inputs)]
            del inputs
            loss = None if self.example.by_trainer else self._loss(output, targets)
            recorder.section = Section("casts", 0)
        recorder.section = Section("forward", recorder.n_blocks + 2)
        loss = self._loss(output, targets) if loss is None else loss
        start = loss if scale is None else loss * scale
        recorder.loss = recorder.storage_of(start)
        recorder.start_backward()
        start.backward()
        recorder.section = Section("end", 0)
        del start, loss
        self.held.clear()

    def _output(self, recorder: Recorder, inputs: Any) -> Any:
        example = self.example
        output = example.module(**inputs) if example.is_mapping else example.module(*inputs)
        recorder.left(recorder.n_blocks + 1)
        if isinstance(output, Tensor) and output.dim():
            recorder.outputs[recorder.n_blocks + 1] = recorder.storage_of(output)
        return output

    def _loss(self, output: list[Any], targets: Any) -> Tensor:
        """The loss of the only output in a list, which is left empty."""
        example = self.example
        held = None if example.by_trainer else output[0]
        found = example.loss(output.pop(), targets) if example.has_targets else example.loss(output.pop())
        if not isinstance(found, Tensor) or found.dim() or not found.requires_grad:
            raise InvalidValue(
                f"loss gives {type(found).__name__}, which does not follow from the weights as one number; "
                "give a function that does."
            )
        self.held += [found.detach()] * example.by_trainer
        share = found / 1
        del held
        return share

    def _inputs(self, point: Point, recorder: Recorder) -> tuple[Any, Any, list[Tensor]]:
        """The inputs and targets at another size, and those of them that have a sequence.

        `point`: a batch, and the tokens of each sequence on a rank.
        """
        leaves, sequences = [], []
        batch, length = point
        for leaf in self.example.leaves:
            made = self.example.resized(leaf, (batch, length * self.ranks.n_given))
            leaves.append(_given(made, recorder) if isinstance(made, Tensor) else made)
            if leaf.has_sequence:
                sequences.append(leaves[-1])
        inputs, targets = tree_unflatten(leaves, self.example.spec)
        return inputs, targets, sequences

    def _hooks(self, parameters: Mapping[str, nn.Parameter], recorder: Recorder) -> list[Any]:
        return [
            parameter.register_post_accumulate_grad_hook(partial(recorder.grad_made, name=self.common(name)))
            for name, parameter in parameters.items()
            if parameter.requires_grad
        ]

    @contextmanager
    def _watched(self, recorder: Recorder, variant: Variant) -> Iterator[None]:
        """Tells the recorder which module runs; recomputed blocks are run again in the backward pass."""
        module = self.example.module
        sharded = variant.units == "block+ends"
        hooks = self.example.hooks_again
        ends = [
            _End(name, own, variant.weights if sharded else "", hooks_again=hooks)
            for name, own in self.ends.items()
        ]
        before: list[tuple[nn.Module, Any]] = []
        try:
            for end in ends:
                end.shard(module, recorder)
            first = {parameter: self.common(name) for name, parameter in module.named_parameters()}
            for path, one in module.named_modules():
                if self.compiles and path.startswith(self.inside):
                    continue
                before.append((one, vars(one).get("forward")))
                scope = self.common(path) or type(one).__name__
                forward = one.forward
                if variant.units == MODULE:
                    own = tuple([first[parameter] for parameter in one.parameters(recurse=False)])
                    forward = hooked_module(forward, partial(recorder.module_hooked, self.common(path), own))
                if self.compiles and one in self.units:
                    forward = compiled(one, variant.recompute)
                if any(placed(parameter) for parameter in one.parameters(recurse=False)):
                    forward = _within(self.ranks.within, forward)
                named = _named(recorder, forward, scope)
                if experts := self._experts(path, one):
                    named = experts.dispatched(recorder, named, variant.weights if variant.casts else "")
                if one in self.units:
                    named = self._told(recorder, named, self.units[one], variant)
                if self.apart and path == self.example.apart:
                    named = _hooked_unit(recorder, named, self.apart)
                if self.example.hooks_again and path == AGAIN:
                    named = _hooked_unit(recorder, named, ())
                for end in ends:
                    if path in end.paths:
                        named = end.marked(recorder, named, path)
                vars(one)["forward"] = named
            yield
        finally:
            for one, forward in before:
                vars(one).pop("forward", None)
                if forward is not None:
                    vars(one)["forward"] = forward

    def _experts(self, path: str, module: nn.Module) -> "_Experts | None":
        """The experts that a module holds, if they are divided over ranks."""
        own = [(name, p) for name, p in module.named_parameters(path, recurse=False) if is_of_experts(p)]
        if not own or self.experts_within:
            return None
        return _Experts([self.common(name) for name, _ in own], own[0][1].shape[0], self.ranks.mesh["ep"])

    def _told(
        self, recorder: Recorder, forward: Callable[..., Any], unit: Unit, variant: Variant
    ) -> Callable[..., Any]:
        is_apart = bool(self.apart) and unit.path.startswith(f"{self.example.apart}.")
        names = tuple(self.of_unit(unit)) if self.example.hooks_again and not is_apart else ()

        def block(*args: Any, **kwargs: Any) -> Any:
            again = recorder.is_recomputing or recorder.is_outside  # by the module itself, or its trainer
            hooked = names if recorder.is_outside else ()
            number = 0 if again else recorder.entered(unit, (args, kwargs))
            if hooked:
                recorder.hooked("pre_forward", hooked)
            if variant.casts:
                args, kwargs = _cast((args, kwargs), variant.weights)
            if variant.recompute == "full" and unit.role == "block" and not self.compiles:
                output = checkpoint(forward, *args, use_reentrant=False, **kwargs)
            else:
                output = forward(*args, **kwargs)
            if not again:
                recorder.left(number, output)
            if hooked:
                recorder.hooked("post_forward", hooked)
            return output

        return block

    def _note_unused(self, parameters: Mapping[str, nn.Parameter]) -> None:
        of_grads = {self.common(n): placed(p.grad) for n, p in parameters.items() if p.grad is not None}
        self.grads_placed |= of_grads
        has_grad = {(self.common(n), p.grad is not None) for n, p in parameters.items() if p.requires_grad}
        unused = frozenset([name for name, used in has_grad if not used])
        if some := sorted(name for name in unused if (name, True) in has_grad):
            without = [name for name, p in parameters.items() if p.requires_grad and p.grad is None]
            raise _PartlyUsed(f"{some[0]} gets a gradient in some of them only", frozenset(without))
        if self.unused not in (None, unused):
            raise MissingRule(
                f"{min(self.unused ^ unused)} gets a gradient in some runs only; freeze it "
                "(requires_grad_(False)), or use it in every loss.",
                kind="a module with parameters that sometimes get a gradient",
            )
        self.unused = unused


def _has_hooks(module: nn.Module) -> bool:
    """Whether a parameter has hooks around FSDP2's all-gather."""
    return any(_hooked(one) is not None for one in module.parameters())


def _hooked(tensor: Tensor) -> Any:
    """The tensor with hooks around FSDP2's all-gather, of a DTensor its local one; None where there are none.

    Source: `torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam._sharded_local_tensor`.
    """
    own = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return own if hasattr(own, HOOK) else None


def _check_hooks(outside: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Raise if a parameter outside the blocks has hooks around FSDP2's all-gather."""
    for name, one in outside:
        if _hooked(one) is not None:
            raise MissingRule(
                f"FSDP2's all-gather of {name} in float8 has no rule, as it is in no block; use "
                "float8_all_gather='none'.",
                kind="FSDP2's all-gather in float8 outside the blocks",
            )


def _are_finer(found: Mapping[str, int], known: Mapping[str, int]) -> bool:
    """Whether blocks are of more kinds than it is known of them."""
    return len({*found.values()}) > len({*known.values()})


def _labels_of(few: Mapping[Stack, int], labels: Mapping[str, int]) -> Mapping[str, int]:
    """The labels of the first blocks of stacks; the last of them stands for the whole stack's last."""
    found: dict[str, int] = {}
    for stack, n in few.items():
        paths = [path for path in stack.blocks if path in labels]
        found |= {path: labels[path] for path in paths[:n]}
        found |= dict.fromkeys(paths[n - 1 : n], labels[paths[-1]] if paths else -1)
    return found


def _units_of(stack: Stack, without_grad: frozenset[str]) -> Iterator[tuple[nn.Module, Unit]]:
    """The blocks of a stack, each as a unit; `without_grad`: parameters that tell blocks apart."""
    structures: dict[Any, int] = {}
    for path, block in stack.blocks.items():
        without = tuple([name for name, _ in block.named_parameters() if f"{path}.{name}" in without_grad])
        number = structures.setdefault((structure_of(block), without), len(structures))
        yield block, Unit(path, stack.path, stack.role, number)


def _common_names(module: nn.Module, units: Iterable[Unit], without_grad: frozenset[str]) -> dict[str, str]:
    """Names of blocks' modules and parameters, with a * for the block's number.

    Where parameters of one name differ between the blocks of a stack, the * is followed by the number of
    their blocks' structure.
    """
    found: dict[str, str] = {}
    known: dict[str, Any] = {}
    for unit in units:
        block = module.get_submodule(unit.path)
        for path, _ in block.named_modules(prefix=unit.path):
            found[path] = f"{unit.common}{path[len(unit.path) :]}"
        for name, parameter in block.named_parameters(prefix=unit.path, remove_duplicate=False):
            like = parameter.shape, parameter.dtype, parameter.requires_grad, name in without_grad
            common = f"{unit.common}{name[len(unit.path) :]}"
            if known.setdefault(common, like) != like:
                common = f"{unit.common}{unit.structure + 1}{name[len(unit.path) :]}"
            found[name] = common
    return found


def _within(mode: AbstractContextManager[Any], forward: Callable[..., Any]) -> Callable[..., Any]:
    def within(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return forward(*args, **kwargs)

    return within


def _named(recorder: Recorder, forward: Callable[..., Any], scope: str) -> Callable[..., Any]:
    def named(*args: Any, **kwargs: Any) -> Any:
        recorder.scopes.append(scope)
        try:
            output = forward(*args, **kwargs)
        except _StopRecomputationError:  # an error leaves the scope, for its text
            recorder.scopes.pop()
            raise
        recorder.scopes.pop()
        return output

    return named


def _hooked_unit(
    recorder: Recorder, forward: Callable[..., Any], parameters: Sequence[str]
) -> Callable[..., Any]:
    """The forward function of a unit of FSDP2 with these parameters, whose hooks are recorded."""

    def hooked(*args: Any, **kwargs: Any) -> Any:
        recorder.hooked("pre_forward", parameters)
        output = forward(*args, **kwargs)
        recorder.hooked("post_forward", parameters)
        return output

    return hooked


class _End:
    """The modules outside the blocks that are an FSDP2 unit of this name, with these parameters.

    `weights`: the type that their weights and arguments have while they run, where that is float32 otherwise;
    "" if they are as any other module. `hooks_again`: FSDP2's hooks are recorded in passes that the module's
    own forward does not make.
    """

    def __init__(
        self, name: str, parameters: Mapping[str, nn.Parameter], weights: str, *, hooks_again: bool
    ) -> None:
        self.name, self.parameters, self.weights = name, parameters, weights
        self.names = tuple(parameters) if hooks_again else ()
        self.paths = modules_with(parameters)
        self.running: set[str] = set()
        """The paths that have not returned yet in a pass outside."""
        self.tables: list[tuple[dict[str, Any], str, Tensor, Tensor]] = []

    def shard(self, module: nn.Module, recorder: Recorder) -> None:
        """Make the weights in float32 of which each rank has a shard."""
        for name, parameter in self.parameters.items() if self.weights else ():
            owner, _, own = name.rpartition(".")
            table = cast(dict[str, Any], module.get_submodule(owner)._parameters)
            self.tables.append((table, own, table[own], _like(parameter, recorder, torch.float32)))
        self._reshard()

    def _reshard(self) -> None:
        for table, name, _, sharded in self.tables:
            table[name] = sharded

    def _unshard(self) -> None:
        for table, name, whole, _ in self.tables:
            table[name] = whole

    def marked(self, recorder: Recorder, forward: Callable[..., Any], path: str) -> Callable[..., Any]:
        """The forward function of one of the modules, whose calls are marked."""

        def marked(*args: Any, **kwargs: Any) -> Any:
            if self.weights:
                args, kwargs = _cast((args, kwargs), self.weights)
            outside = recorder.is_outside
            if outside:
                self._called_outside(recorder)
            else:
                recorder.end_called(self.name, self.paths)
            self._unshard()
            output = forward(*args, **kwargs)
            if outside:
                returned = self._returned_outside(recorder, path)
            else:
                returned = recorder.end_returned(self.name, path, output)
            if returned:
                self._reshard()
            return output

        return marked

    def _called_outside(self, recorder: Recorder) -> None:
        if not self.running:
            self.running |= {*self.paths}
            if self.names:
                recorder.hooked("pre_forward", self.names)

    def _returned_outside(self, recorder: Recorder, path: str) -> bool:
        self.running.discard(path)
        if self.names and not self.running:
            recorder.hooked("post_forward", self.names)
        return not self.running


class _PostBackward(torch.autograd.Function):
    """What FSDP2 puts before a unit: its backward pass runs when the gradients of all arguments are there.

    Source: `torch.distributed.fsdp._fully_shard._fsdp_param_group:RegisterPostBackwardFunction`.
    """

    @staticmethod
    def forward(ctx: Any, called: Callable[[], None], *arguments: Tensor) -> tuple[Tensor, ...]:
        ctx.called = called
        return arguments

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.called()
        return (None, *grads)


class _Experts(NamedTuple):
    """A module's experts, divided over ranks: the parameters' names, and how many experts and ranks.

    FSDP2 shards them as a unit of their own.
    """

    names: Sequence[str]
    n_experts: int
    n_ranks: int

    def dispatched(self, recorder: Recorder, forward: Callable[..., Any], weights: str) -> Callable[..., Any]:
        """The forward function, called with tokens dealt out evenly; FSDP2's hooks are recorded.

        `weights`: the type that its arguments are cast to; "" if they are not.
        """

        def hooked(when: HookKind, *_: Any) -> None:
            recorder.hooked(when, self.names)

        def dispatched(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = tree_map_only(Tensor, self._dealt_out, (args, kwargs))
            if weights:
                args, kwargs = _cast((args, kwargs), weights)
            hooked("pre_forward")
            args, kwargs = self._watched(partial(hooked, "post_backward"), (args, kwargs))
            output = forward(*args, **kwargs)
            hooked("post_forward")
            for one in tensors(output):
                if one.requires_grad:
                    one.register_hook(partial(hooked, "pre_backward"))
            return output

        return dispatched

    def _dealt_out(self, tensor: Tensor) -> Tensor:
        """The numbers of the experts of each token, of which none was known, as evenly as can be."""
        if not tensor.is_floating_point():
            make_known(local(tensor), dealt_out(tensor.numel(), self.n_experts, self.n_ranks))
        return tensor

    @staticmethod
    def _watched(called: Callable[[], None], arguments: Any) -> Any:
        leaves, spec = tree_flatten(arguments)
        places = [i for i, one in enumerate(leaves) if isinstance(one, Tensor) and one.requires_grad]
        if places:
            watched = cast(Any, _PostBackward).apply(called, *[leaves[i] for i in places])
            for i, one in zip(places, watched, strict=True):
                leaves[i] = one
        return tree_unflatten(leaves, spec)


def _depends_on_values(recorder: Recorder, error: Exception) -> MissingRule:
    """The error for a module that looks at values of floats, or at what follows from them."""
    return MissingRule(
        f"{_where(recorder)} cannot be traced: {recorder.operation} needs values, and of floats only shapes "
        f"are known ({reason(error)}); let what is computed not depend on them, or trace the module without "
        "that part.",
        kind="a module whose passes depend on values",
    )


def _has_no_kernel(error: Exception) -> bool:
    """Whether PyTorch has no kernel with which an operation could run on tensors without data."""
    return isinstance(error, UnsupportedOperatorException) or (
        isinstance(error, NotImplementedError) and str(error).startswith("Could not run")
    )


def _without_kernel(recorder: Recorder, error: Exception) -> MissingRule:
    """The error for a module that calls an operation that gives no shapes."""
    return MissingRule(
        f"{_where(recorder)} cannot be traced: it calls an operation that has no rule of shapes "
        f"({reason(error)}); use another one, or trace the module on a GPU (executed=True).",
        kind="a module with an operation that has no rule of shapes",
    )


class _Fails(InvalidValue):
    """The module's own code fails."""


def _where(recorder: Recorder) -> str:
    """The innermost module that runs."""
    return recorder.scopes[-1] if recorder.scopes else "the loss"


def _cast(inputs: Any, weights: str) -> Any:
    """Arguments with floats cast to the weights' type, as FSDP2 casts them."""
    dtype = getattr(torch, weights)
    if dtype == torch.float32:
        return inputs
    return tree_map_only(Tensor, lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, inputs)


def _without_values(tensor: Tensor, recorder: Recorder, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor like this one, without data; integers are known, and 0 on `meta`. On a GPU with its values."""
    if recorder.executes:
        own = torch.zeros_like(tensor, device="cpu") if tensor.is_meta else tensor.detach()
        return own.to(recorder.device, dtype or tensor.dtype)
    meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device="meta")
    made = recorder.shapes.without_data(meta, recorder.device)
    if not (tensor.is_floating_point() or tensor.is_complex()):
        known = torch.zeros_like(tensor, device="cpu") if tensor.is_meta else tensor.detach().clone()
        made.real_tensor = known
    return made


def _given(tensor: Tensor, recorder: Recorder) -> Tensor:
    """A tensor like this one, on tensors without data, that was there before the step."""
    made = _without_values(tensor, recorder)
    recorder.register(made)
    return made


def _like(tensor: Tensor, recorder: Recorder, weights: torch.dtype) -> Tensor:
    """A parameter, of type `weights` if it is one of floats, or a buffer, on tensors without data.

    Where `weights` are float32, frozen ones keep a narrower type (`TracedTensor.keeps_dtype`). A parameter
    with hooks around FSDP2's all-gather is what these make of its output. It has the hooks of its gradient.

    Source: `torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam.init_unsharded_param`.
    """
    is_parameter, own = isinstance(tensor, nn.Parameter), local(tensor)
    keeps = weights == torch.float32 and not tensor.requires_grad
    dtype = weights if is_parameter and tensor.is_floating_point() and not keeps else tensor.dtype
    hooked = _hooked(tensor)
    gathered = dtype if hooked is None else hooked._dtype
    if not is_parameter:
        made = _without_values(own.detach(), recorder)
    elif recorder.executes:
        made = torch.empty_like(own, dtype=gathered, device=recorder.device, requires_grad=False)
    else:  # nothing is asked of the values of weights
        made = _without_values(torch.empty_like(own, device="meta"), recorder, gathered)
    recorder.register(made, WEIGHT if is_parameter else GIVEN)
    with nullcontext() if recorder.executes else recorder:  # a parameter is a view of its tensor
        if hooked is not None:
            scale = _given(torch.ones(()), recorder)
            made, _ = hooked.fsdp_post_all_gather((made,), (scale,), dtype)
        if isinstance(tensor, DTensor):
            made = wrapped(made, tensor)
        if not is_parameter:
            return made
        parameter = nn.Parameter(made, requires_grad=tensor.requires_grad)
    for hook in (tensor._backward_hooks or {}).values():
        parameter.register_hook(hook)
    return parameter


@contextmanager
def _without_data(
    module: nn.Module, recorder: Recorder, weights: torch.dtype
) -> Iterator[dict[str, nn.Parameter]]:
    """The module's parameters, of type `weights`, and its buffers have shapes only, and the module trains."""
    tables: list[dict[str, Any]] = [t for one in module.modules() for t in (one._parameters, one._buffers)]
    own = [(table, dict(table)) for table in tables]
    training = {one: one.training for one in module.modules()}
    made: dict[int, Any] = {id(None): None}
    try:
        for table, before in own:
            for name, tensor in before.items():
                if id(tensor) not in made:
                    made[id(tensor)] = _like(tensor, recorder, weights)
                table[name] = made[id(tensor)]
        module.train()
        with ExitStack() as stack:
            for change in (*_passing_by(recorder), *_replaced_in_each_step(module)):
                stack.enter_context(change)
            yield dict(module.named_parameters())
    finally:
        for table, before in own:
            table.update(before)
        for one, was in training.items():
            one.training = was


def _passing_by(recorder: Recorder) -> Iterator[Any]:
    """Replaces functions that bypass the dispatcher or ask whether tensors have data; turns oneDNN off.

    Allocations of oneDNN's kernels depend on the model of the CPU.

    Source: torch/utils/checkpoint.py (`fwd_cpu_state`); torch/csrc/utils/tensor_new.cpp (`recursive_store`,
    which reads numbers out of tensors in a list); transformers.utils.import_utils (`is_fake_tensor`).
    """
    random_state = torch.get_rng_state

    def random_state_seen() -> Tensor:
        state = random_state()
        if recorder.device.type == "cpu":
            recorder.made(state, "get_rng_state")
        return state

    def listed(tensor: FakeTensor) -> Any:
        return known_value(tensor).tolist()

    made_of = torch.tensor

    def of_numbers(data: Any, *args: Any, **kwargs: Any) -> Tensor:
        if isinstance(data, list):
            data = tree_map_only(FakeTensor, lambda one: known_value(one).item(), data)
        return made_of(data, *args, **kwargs)

    for name in ADD_IN_PLACE:
        adding = patch.object(recorder, "adds_in_place", True)(getattr(functional, name))
        yield patch.object(functional, name, adding)
    yield setting(torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled, False)
    yield patch.object(torch, "get_rng_state", random_state_seen)
    yield patch.object(FakeTensor, "tolist", listed)
    yield patch.object(torch, "tensor", of_numbers)
    kernels = sys.modules.get("transformers.integrations.hub_kernels")
    if kernels is not None:
        yield patch.object(kernels.logger, "warning_once", recorder.note_fallback)
    asks = sys.modules.get("transformers.utils.import_utils")
    if asks is not None and hasattr(asks, "is_fake_tensor"):
        yield patch.object(asks, "is_fake_tensor", lambda tensor: False)


def _replaced_in_each_step(module: nn.Module) -> Iterator[Any]:
    """Lets modules drop what each step replaces: what they keep of the step before is an input."""
    owners = {type(one) for one in module.modules() if POSITIONS in vars(one)}
    for owner in owners:
        dropped = property(lambda _: None, lambda _, value: None)
        yield patch.object(owner, POSITIONS, dropped, create=True)


@contextmanager
def _checkpointing(module: nn.Module) -> Iterator[None]:
    """Tells a module of transformers that its blocks are recomputed, though here the tracer recomputes them.

    Token embeddings require gradients even if they are frozen. Modules whose flag is their own see it: T5's
    attention makes zeros that require a gradient where a stack has no position bias.

    Source: transformers.modeling_utils (`PreTrainedModel.gradient_checkpointing_enable`),
    transformers.models.t5.modeling_t5 (`T5Attention.forward`).
    """
    owner = cast(Any, module)
    hooked = getattr(module, "main_input_name", "") == "input_ids" and hasattr(
        module, "enable_input_require_grads"
    )
    with ExitStack() as stack:
        for one in module.modules():
            if vars(one).get(FLAG) is False and not hasattr(type(one), FLAG):
                stack.enter_context(patch.object(one, FLAG, True))
        if hooked:
            owner.enable_input_require_grads()
            stack.callback(owner.disable_input_require_grads)
        yield


# --- Recordings ---


def _frees_in_one(parts: Parts) -> bool:
    """Whether what is no block frees a tensor of several blocks, as an output that holds their keys does."""
    for part, events in parts.parts.items():
        if part.partition("_")[0] in ("embed", "head", "loss", "end"):
            changes = Counter(event.storage for event in events if event.kind == "free")
            changes.subtract(event.storage for event in events if event.kind == "alloc")
            if any(n > 1 for n in changes.values()):
                return True
    return False


def _recorded(
    made: Callable[..., _Tracer], runs: Sequence[tuple[str, str]]
) -> tuple[_Tracer, dict[Variant, Recording], Point | None]:
    """The tracer that tells blocks apart of which some get no gradient, and what it recorded."""
    tracer = made()
    try:
        return tracer, *_of_known_kinds(tracer, runs)
    except _PartlyUsed as partly:
        finer = made(without_grad=partly.without_grad)
        return finer, *_of_known_kinds(finer, runs)


def _of_known_kinds(
    tracer: _Tracer, runs: Sequence[tuple[str, str]]
) -> tuple[dict[Variant, Recording], Point | None]:
    """`_recordings`, with all kinds of blocks that any of the runs tells apart."""
    while True:
        with suppress(_Finer):
            return _recordings(tracer, runs)


def _recordings(
    tracer: _Tracer, runs: Sequence[tuple[str, str]]
) -> tuple[dict[Variant, Recording], Point | None]:
    """Each variant of the module, for any size if rules are found, else for the example's.

    Raises:
        Unlike: the blocks are not equal.
    """
    (batch, whole), cp = tracer.example.point, tracer.ranks.cp
    length = whole // cp
    tried = (
        ()
        if tracer.executes or tracer.compiles or tracer.example.is_of_one_size
        else (_lengths(tracer.example, length), (length, length, length))
    )
    for lengths in dict.fromkeys(tried):
        try:
            found = _for_any_batch(tracer, runs, lengths)
        except (MissingRule, Unlike) as error:
            if tracer.any_length and isinstance(error, OfOneSize):
                raise _of_one_length(tracer) from error
            continue
        known = batch if tracer.example.is_of_one_batch else 0
        is_of_length = lengths[0] == length and tracer.example.has_sequence
        return found, (known, whole if is_of_length else 0) if known or is_of_length else None
    alone: dict[Variant, Recording] = {}
    for variant in _variants(tracer, runs):
        try:
            parts = tracer.run((batch, length), variant)
        except _Fails:
            if not _is_new(variant, alone):
                raise
            continue
        alone[variant._replace(alone=batch == 1)] = recording_of([parts], [(batch, length)])
    return alone, (batch, whole)


def _of_one_length(tracer: _Tracer) -> MissingRule:
    """The error for a module that is known at the traced lengths only."""
    what, packages = "what it does differs at each", " and ".join(tracer.lacks)
    trace_it = "trace it with inputs of your length: memplan.trace(module, inputs)."
    if packages:
        what = f"{packages} are not installed, and what transformers computes instead differs at each"
        trace_it = f"{trace_it[:-2]}, executed=True), on a GPU that has them."
    return MissingRule(
        f"{type(tracer.example.module).__name__} follows no rule of the length: {what}; {trace_it}",
        kind="a module that is known at the traced lengths only",
    )


def _variants(tracer: _Tracer, runs: Sequence[tuple[str, str]]) -> Iterator[Variant]:
    """How the module is run; under other units of FSDP2 where these change the run before."""
    recomputes: Sequence[str] = RECOMPUTES if tracer.stacks else RECOMPUTES[:1]
    if tracer.zero3 or tracer.ranks.of_deepspeed:
        plain = Variant("", "", "none", alone=False, units=MODULE if tracer.zero3 else "")
        for (weights, _), again, rotate in product(runs, recomputes, tracer.ranks.rotates):
            yield plain._replace(weights=weights, recompute=again, rotate=rotate)
        return
    for weights, autocast in runs:
        units = UNITS[1:] if tracer.stacks and not autocast and weights != "float32" else ()
        if tracer.compiles:
            recomputes = tracer.compiles.recomputes
        for again, rotate in product(recomputes, tracer.ranks.rotates):
            cp_rank = tracer.ranks.context.cp_rank if tracer.ranks.context else 0
            plain = Variant(weights, autocast, again, alone=False, rotate=rotate, cp_rank=cp_rank)
            yield plain
            for other in units:
                if tracer.differs(other):
                    yield plain._replace(units=other)


def _for_any_batch(
    tracer: _Tracer, runs: Sequence[tuple[str, str]], lengths: Sequence[int]
) -> dict[Variant, Recording]:
    """Each variant that PyTorch runs, for any batch, and for any length if there are several.

    Of a module that goes through the samples of a batch one by one for the example's batch alone.
    """
    found: dict[Variant, Recording] = {}
    n, of_one = tracer.example.point[0], tracer.example.is_of_one_batch
    several, alone = (
        list(zip(batches, lengths, strict=True)) for batches in ((n, n, n) if of_one else BATCHES, (1, 1, 1))
    )
    longer = [one for one in _check_points(tracer) if one[1] in lengths or len({*lengths}) > 1]
    for variant in _variants(tracer, runs):
        points = [*several, *([] if found else longer)]
        if of_one and longer:  # of one batch three lengths tell rules apart, and two a further variant's
            points = [*several[: 1 if found else 2], *longer]
        try:
            found[variant._replace(alone=of_one and n == 1)] = _agreed(tracer, variant, points)
        except (NotRun, _Fails):
            if not _is_new(variant, found):
                raise
            continue
        if of_one:
            continue
        try:
            found[variant._replace(alone=True)] = _agreed(tracer, variant, alone[: len(points)])
        except _Fails:  # normalisation over a batch refuses a single sample
            continue
    return found


def _is_new(variant: Variant, found: Iterable[Variant]) -> bool:
    """Whether a variant that fails has weights of a type that none before had: PyTorch may refuse these.

    It refuses products of masks in float32 with narrow values, say, and narrow weights of batch norm.
    """
    types = {one.weights for one in found}
    return bool(types) and variant.weights not in types


def _check_points(tracer: _Tracer) -> list[Point]:
    """The size at which rules are checked: the example's, or a shorter one whose masks are small."""
    batch, length = tracer.example.point[0], tracer.example.point[1] // tracer.ranks.cp
    shorter = min(length, isqrt(MOST_MASKED // batch) // 16 * 16)
    several = batch > 1 or tracer.example.is_of_one_batch
    return [(batch, shorter)] if several and shorter >= min(length, max(LENGTHS)) else []


def _agreed(tracer: _Tracer, variant: Variant, points: Iterable[Point]) -> Recording:
    """The recording that runs of several sizes agree on; the first three must before a fourth, longer one."""
    each, runs = list(dict.fromkeys(points)), list[Parts]()
    for point in each:
        if len(runs) == len(BATCHES):
            recording_of(runs, each[: len(runs)])
        runs.append(tracer.run(point, variant))
    return recording_of(runs, each)


def _lengths(example: Example, length: int) -> tuple[int, ...]:
    """Three sequence lengths to trace: multiples of 16 where possible, none equal to a dim of a parameter.

    `length`: the example's, as a rank has it.
    """
    if not example.has_sequence:
        return (1, 1, 1)
    if length < LEAST_LENGTH:
        raise InvalidValue(f"the example's sequence has {length} tokens; give one of {LEAST_LENGTH} or more.")
    fixed = example.image_tokens
    text = length - fixed
    of_text = LENGTHS if text >= max(LENGTHS) else (text * 3 // 4, text, text // 2)
    usual = tuple([fixed + n for n in of_text])
    dims = {n for p in example.module.parameters() for n in (*p.shape, *local(p).shape)}
    for apart in (16, 8):
        found = [next((m for m in range(n, fixed, -gcd(n, apart)) if m not in dims), n) for n in usual]
        if len({*found}) == len(usual) and dims.isdisjoint(found):
            return tuple(found)
    return usual


def _model(
    tracer: _Tracer,
    recordings: dict[Variant, Recording],
    limits: Point | None,
    name: str,
    max_seq_len: int | None,
) -> TracedModel:
    example, module = tracer.example, tracer.example.module
    unused = tracer.unused or frozenset()

    def traced(own: Mapping[str, nn.Parameter]) -> tuple[TracedTensor, ...]:
        found = [_of_module(n, p, p.requires_grad and n not in unused) for n, p in own.items()]
        return tuple([one._replace(grad_placements=_grad_placements(one, tracer)) for one in found])

    before, after = map(traced, tracer.outside())
    layers, of_kind = _kinds_of_blocks(tracer, traced)
    config = getattr(module, "config", None)
    known = getattr(config, "max_position_embeddings", None)
    longest = max_seq_len or (known if isinstance(known, int) else None) or example.point[1]
    return TracedModel(
        name=name or type(example.module).__name__,
        layers=layers,
        of_kind=of_kind,
        max_seq_len=checked_count("max_seq_len", longest),
        tied=len(list(module.parameters())) < sum(1 for _ in module.named_parameters(remove_duplicate=False)),
        blocks=tuple(dict.fromkeys([unit.common for unit in tracer.units.values()])),
        embed_parameters=before,
        head_parameters=after,
        module_buffers=tuple([_of_module(*named) for named in example.module.named_buffers()]),
        inputs_of_step=tuple(_inputs_of_step(example)),
        recordings=recordings,
        device="cpu" if tracer.device.type == "cpu" else "cuda",
        made_with=_made_with(example.module, tracer.device, executed=tracer.executes),
        has_sequence=example.has_sequence,
        limits=limits,
        image_tokens=example.image_tokens,
        neglects=tuple(tracer.neglected),
        unused=tuple(sorted(unused)),
        lacks=tuple(tracer.lacks),
        attention="eager" if getattr(config, "_attn_implementation", None) == "eager" else "",
        mesh=tracer.ranks.mesh,
    )


def _grad_placements(one: TracedTensor, tracer: _Tracer) -> Placed:
    """The placements of a DTensor's gradient, if they are not its own."""
    found = tracer.grads_placed.get(one.name, one.placements)
    return () if found == one.placements else found


def _kinds_of_blocks(
    tracer: _Tracer, traced: Callable[[Mapping[str, nn.Parameter]], tuple[TracedTensor, ...]]
) -> tuple[tuple[Layers, ...], dict[str, TracedKind]]:
    """The blocks in the order of their calls, then the ones that are never called, and their kinds."""
    whole = tracer.whole
    layers = [] if whole is None else [*whole.layers]
    like = {} if whole is None else {**whole.like}
    called = {unit.path for unit in like.values()} if whole is None else {*whole.labels}
    idle = [unit for unit in tracer.units.values() if unit.path not in called]
    for (stack, _), same in groupby(idle, key=lambda unit: (unit.stack, unit.structure)):
        found = list(same)
        kind = f"{stack} {len(like)}, never called" if like else BLOCKS
        like[kind] = found[0]._replace(role="idle")
        layers.append(Layers(kind, len(found)))
    if not like:
        return (Layers(BLOCKS, 0),), {BLOCKS: TracedKind("block", ())}
    return tuple(layers), {k: TracedKind(unit.role, traced(tracer.of_unit(unit))) for k, unit in like.items()}


def _of_module(name: str, tensor: Tensor, requires_grad: bool = True) -> TracedTensor:
    """A buffer, or a parameter; one that is unused is cast as a trained one."""
    dtype = "float32" if tensor.requires_grad and not requires_grad else dtype_name(tensor.dtype)
    whole, divided_by = divided_shape(tensor)
    shape = tuple([(Term(n),) for n in whole])
    hooked = _hooked(tensor)
    gathered_as = "" if hooked is None else dtype_name(hooked._dtype)
    own = placed(tensor) or divided_by
    return TracedTensor(name, shape, dtype, requires_grad, own, gathered_as=gathered_as)


def _inputs_of_step(example: Example) -> Iterator[TracedTensor]:
    """The tensors that the step is given, each once, and those that the step before has left."""
    points = list(zip(BATCHES, LENGTHS, strict=True))
    for leaf in {id(leaf.value): leaf for leaf in example.leaves if isinstance(leaf.value, Tensor)}.values():
        shape = shape_of([example.resized(leaf, point).shape for point in points], points)
        yield TracedTensor(leaf.name, shape, dtype_name(leaf.value.dtype))
    says_images = {"mm_token_type_ids", "image_grid_thw"} <= {leaf.name for leaf in example.leaves}
    if says_images and any(POSITIONS in vars(one) for one in example.module.modules()):
        yield TracedTensor(POSITIONS, ((Term(example.point[0]),), (Term(1),)), "int64")


def _made_with(module: nn.Module, device: torch.device, *, executed: bool) -> str:
    """The releases of torch and of the module's own package, and the GPU."""
    package = type(module).__module__.partition(".")[0]
    version = getattr(sys.modules.get(package), "__version__", None)
    own = (
        f", {package} {version.partition('+')[0]}" if package != "torch" and isinstance(version, str) else ""
    )
    gpu = f", {torch.cuda.get_device_name(device)}" if executed else ""
    return f"torch {torch.__version__.partition('+')[0]}{own}{gpu}"
