"""`memplan.trace`: a module's forward and backward pass on tensors without data, as a model to plan with."""

import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

from typing import Any, Final
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
)
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from memplan.checks import checked_count
from memplan.errors import InvalidValue, MissingRule, shown_value, unknown_name
from memplan.models.traced import Recording, TracedModel, TracedTensor, Variant
from memplan.tracing.recorder import Recorder
from memplan.tracing.shapes import Shapes
from memplan.tracing.units import Parts, Point, Unlike, parts_of, recording_of, size_of
from memplan.tracing.values import known_value

Loss = Callable[..., Tensor]
"""From a module's output, and the targets if there are any, to a single number."""

RUNS: Final[Mapping[str, tuple[tuple[str, str], ...]]] = {
    "fp32": (("float32", ""),),
    "bf16": (("bfloat16", ""),),
    "bf16-mixed": (("float32", "bfloat16"), ("bfloat16", "")),
}
"""The types of weights and of autocast that a plan's precision runs in: with mixed, under DDP and under FSDP2."""

LENGTHS: Final = (48, 80)
"""Sequences that are traced where the example is longer: short, so that masks can be computed."""

MOST_MASKED: Final = 1 << 20
"""Elements of the largest mask with which rules of sizes are checked."""

CANNOT: Final = (
    NotImplementedError,
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
"""What is raised where a value is needed that is not known."""


def trace(
    module: nn.Module,
    example_inputs: Any,
    *,
    loss: Loss | None = None,
    targets: Tensor | None = None,
    blocks: str | None = None,
    sequence: Sequence[str | int] | None = None,
    precisions: Sequence[str] = ("fp32", "bf16", "bf16-mixed"),
    max_seq_len: int | None = None,
    name: str = "",
) -> TracedModel:
    """The module as a model to plan with: `memplan.estimate(memplan.trace(module, inputs), zero=3, dp=8)`.

    Nothing is computed, and the module is left as it was; its weights may be on the `meta` device. The first
    dim of each input is the batch; the second is the sequence in those of integers that all have the same,
    or in those that `sequence` names. Sizes are known for any batch and length, where they follow from rules
    that runs at several sizes agree on.

    Args:
        module: the module, all of whose parameters are trained.
        example_inputs: what it is called with: a tensor, a tuple, or a dict of keywords.
        loss: from its output (and `targets`) to the loss; left out, the output's `loss`, the output itself
            if it is a single number, or cross-entropy with the targets.
        targets: what the loss compares with.
        blocks: the path of the list of equal blocks, as "model.layers"; "" for none; left out, the list with
            the most parameters whose blocks are equal.
        sequence: names (or places) of the inputs whose second dim is the sequence.
        precisions: those to trace for.
        max_seq_len: the longest sequence, to be named in notes; left out, the configuration's, or the example's.
        name: what to call it; left out, its class.

    Raises:
        InvalidValue: for a module or an example that cannot be used, and why.
        MissingRule: for a module whose passes depend on values of floats.
    """
    asked = _asked(module, example_inputs, loss, targets, sequence)
    runs = dict.fromkeys(run for precision in precisions for run in _runs(precision))
    why = ""
    for path in _candidates(module, blocks):
        tracer = _Tracer(asked, path)
        try:
            with _no_collection():
                recordings, limits = _recordings(tracer, list(runs))
        except Unlike as unlike:
            why = f"{path}: {unlike}"
            continue
        return _model(tracer, recordings, limits, name, max_seq_len)
    raise InvalidValue(f"blocks={blocks!r} are not equal ({why}); leave blocks out.")


@contextmanager
def _no_collection() -> Iterator[None]:
    """Storages go when their last reference does, and not when garbage is collected."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _runs(precision: str) -> tuple[tuple[str, str], ...]:
    if precision not in RUNS:
        raise unknown_name("precision to trace", precision, RUNS)
    return RUNS[precision]


# --- What is asked ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A module with its example: leaves of the inputs, and which of them follow batch and sequence."""

    module: nn.Module
    leaves: tuple[Any, ...]
    names: tuple[str, ...]
    spec: Any
    is_mapping: bool
    has_targets: bool
    loss: Loss
    has_sequence: tuple[bool, ...]
    point: Point
    shapes: Shapes


def _asked(
    module: nn.Module,
    example_inputs: Any,
    loss: Loss | None,
    targets: Tensor | None,
    sequence: Sequence[str | int] | None,
) -> Asked:
    _check_module(module)
    example = (example_inputs,) if isinstance(example_inputs, Tensor) else example_inputs
    if not isinstance(example, Mapping | tuple | list):
        raise InvalidValue(
            f"example_inputs={shown_value(example)} is not allowed; give a tensor, a tuple, or a dict of keywords."
        )
    example = dict(example) if isinstance(example, Mapping) else tuple(example)
    leaves, spec = tree_flatten((example, targets))
    named = [f"{key}" for key in example] if isinstance(example, dict) else [f"input {i}" for i in range(len(example))]
    flat = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not flat:
        raise InvalidValue("example_inputs hold no tensor; give the tensors that the module is called with.")
    per_key = [tree_flatten(example[key] if isinstance(example, dict) else example[key])[0] for key in (example if isinstance(example, dict) else range(len(example)))]
    names = [name for name, part in zip(named, per_key, strict=True) for _ in part]
    names += ["targets"] * (len(leaves) - len(names))
    batch = flat[0].shape[0] if flat[0].dim() else 0
    if batch < 1:
        raise InvalidValue("the first tensor of example_inputs has no first dim; it must be the batch.")
    follows = [
        isinstance(leaf, Tensor) and leaf.dim() > 1 and _is_sequence(leaf, name, i, sequence)
        for i, (leaf, name) in enumerate(zip(leaves, names, strict=True))
    ]
    lengths = {leaf.shape[1] for leaf, yes in zip(leaves, follows, strict=True) if yes}
    if len(lengths) > 1:
        raise InvalidValue(
            f"inputs have sequences of {sorted(lengths)}; name those with one length by sequence=[...]."
        )
    return Asked(
        module=module,
        leaves=tuple(leaves),
        names=tuple(names),
        spec=spec,
        is_mapping=isinstance(example, dict),
        has_targets=targets is not None,
        loss=_standard_loss if loss is None else loss,
        has_sequence=tuple(follows),
        point=(batch, lengths.pop() if lengths else 1),
        shapes=Shapes(),
    )


def _is_sequence(leaf: Tensor, name: str, place: int, asked: Sequence[str | int] | None) -> bool:
    if asked is not None:
        return name in asked or place in asked
    return not leaf.is_floating_point() and leaf.dim() == 2


def _check_module(module: nn.Module) -> None:
    if not isinstance(module, nn.Module):
        raise InvalidValue(f"module={shown_value(module)} is no torch.nn.Module; give one.")
    parameters = dict(module.named_parameters())
    if not parameters:
        raise InvalidValue(f"{type(module).__name__} has no parameters; there is nothing to train.")
    frozen = [name for name, parameter in parameters.items() if not parameter.requires_grad]
    if frozen:
        raise MissingRule(
            f"{len(frozen)} parameters are frozen ({frozen[0]} ...); no rule knows frozen ones yet: trace the "
            "module with requires_grad_(True), whose gradients and states are more.",
            kind="a module with frozen parameters",
        )
    odd = [name for name, parameter in parameters.items() if not parameter.is_floating_point()]
    if odd:
        raise InvalidValue(f"parameter {odd[0]} is of {parameters[odd[0]].dtype}; parameters must be real floats.")


def _standard_loss(output: Any, targets: Tensor | None = None) -> Tensor:
    """The output's own loss, the output if it is one number, or cross-entropy with the targets."""
    own = getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own
    if isinstance(output, Tensor) and output.dim() == 0:
        return output
    if isinstance(output, Tensor) and targets is not None:
        return F.cross_entropy(output.flatten(0, targets.dim() - 1), targets.flatten())
    raise InvalidValue(
        f"the module returns {type(output).__name__}, which is no loss; give targets=, or loss= from its output to one."
    )


def _candidates(module: nn.Module, blocks: str | None) -> Iterator[str]:
    """Paths of lists of blocks, those with the most parameters first; "" for none."""
    lists = {
        path: list(one.children())
        for path, one in module.named_modules()
        if path and isinstance(one, nn.ModuleList | nn.Sequential | nn.ModuleDict) and _may_be_equal(list(one.children()))
    }
    if blocks is not None:
        if blocks and blocks not in lists:
            raise unknown_name("list of equal blocks", blocks, lists)
        yield blocks
        return
    elements = {path: sum(p.numel() for one in found for p in one.parameters()) for path, found in lists.items()}
    yield from sorted(elements, key=lambda path: -elements[path])
    yield ""


def _may_be_equal(blocks: Sequence[nn.Module]) -> bool:
    shapes = [[(name, p.shape) for name, p in block.named_parameters()] for block in blocks]
    return len(blocks) > 1 and bool(shapes[0]) and all(own == shapes[0] for own in shapes)


# --- Runs ---


class _Tracer:
    """Runs a module with its blocks in one list."""

    def __init__(self, asked: Asked, path: str) -> None:
        self.asked = asked
        self.path = path
        found = asked.module.get_submodule(path) if path else None
        self.blocks = [] if found is None else list(found.children())
        self.prefixes = [] if found is None else [f"{path}.{name}" for name, _ in found.named_children()]

    def common(self, name: str) -> str:
        """A name in the module, with a * in the place of a block's number."""
        for prefix in self.prefixes:
            if name == prefix or name.startswith(f"{prefix}."):
                return f"{self.path}.*{name[len(prefix) :]}"
        return name

    def run(self, point: Point, weights: str, autocast: str, recompute: str) -> Parts:
        """One forward and backward pass.

        Raises:
            MissingRule: what happens depends on values that are not known.
        """
        recorder = Recorder(len(self.blocks), self.asked.shapes)
        with _without_data(self.asked.module, recorder, getattr(torch, weights)) as parameters:
            inputs, targets = self._inputs(point, recorder)
            recorder.events.clear()
            with ExitStack() as stack:
                for hook in self._hooks(parameters, recorder):
                    stack.callback(hook.remove)
                stack.enter_context(self._watched(recorder, again=recompute == "full"))
                stack.enter_context(recorder)
                try:
                    self._step(recorder, inputs, targets, weights, autocast)
                except CANNOT as error:
                    where = recorder.scopes[-1] if recorder.scopes else "the module"
                    raise MissingRule(
                        f"{where} cannot be traced: {recorder.operation} needs a value, and of floats only the shape "
                        f"is known ({str(error).splitlines()[0] if str(error) else type(error).__name__}); let it not "
                        "depend on values, or trace the parts around it.",
                        kind="a module whose passes depend on values",
                    ) from error
                self._check_gradients(parameters)
        return parts_of(recorder, self.prefixes)

    def _step(self, recorder: Recorder, inputs: Any, targets: Any, weights: str, autocast: str) -> None:
        with torch.autocast("cpu", getattr(torch, autocast)) if autocast else nullcontext():
            loss = self._loss(recorder, _cast(inputs, getattr(torch, weights)), targets)
            recorder.leaving_autocast()
        recorder.start_backward()
        loss.backward()  # type: ignore[no-untyped-call]
        recorder.end_backward()
        del loss

    def _loss(self, recorder: Recorder, inputs: Any, targets: Any) -> Tensor:
        asked = self.asked
        output = asked.module(**inputs) if asked.is_mapping else asked.module(*inputs)
        recorder.left(len(self.blocks) + 1)
        found = asked.loss(output, targets) if asked.has_targets else asked.loss(output)
        if not isinstance(found, Tensor) or found.dim() or not found.requires_grad:
            raise InvalidValue(f"loss gives {type(found).__name__}, which is no single number of the weights.")
        return found / 1

    def _inputs(self, point: Point, recorder: Recorder) -> tuple[Any, Any]:
        """The example at another size."""
        asked = self.asked
        leaves = []
        for leaf, follows in zip(asked.leaves, asked.has_sequence, strict=True):
            made = leaf
            if isinstance(leaf, Tensor):
                made = _without_values(_resized(leaf, asked.point, point, follows), recorder)
                recorder.known(made)
            leaves.append(made)
        inputs, targets = tree_unflatten(leaves, asked.spec)
        return inputs, targets

    def _hooks(self, parameters: Mapping[str, nn.Parameter], recorder: Recorder) -> list[Any]:
        def made(name: str) -> Callable[[Any], None]:
            return lambda parameter: recorder.grad_made(parameter, name)

        return [
            parameter.register_post_accumulate_grad_hook(made(name)) for name, parameter in parameters.items()
        ]

    @contextmanager
    def _watched(self, recorder: Recorder, *, again: bool) -> Iterator[None]:
        """The recorder is told which module runs; blocks are run `again` in the backward pass."""
        units = {block: i for i, block in enumerate(self.blocks, start=1)}
        before: list[tuple[nn.Module, Any]] = []
        try:
            for path, one in self.asked.module.named_modules():
                before.append((one, vars(one).get("forward")))
                vars(one)["forward"] = self._told(
                    recorder, one.forward, self.common(path) or type(one).__name__, units.get(one), again
                )
            yield
        finally:
            for one, forward in before:
                del vars(one)["forward"]
                if forward is not None:
                    vars(one)["forward"] = forward

    def _told(
        self, recorder: Recorder, forward: Callable[..., Any], path: str, unit: int | None, again: bool
    ) -> Callable[..., Any]:
        def named(*args: Any, **kwargs: Any) -> Any:
            recorder.scopes.append(path)
            output = forward(*args, **kwargs)
            recorder.scopes.pop()
            return output

        if unit is None:
            return named

        def recomputed(*args: Any, **kwargs: Any) -> Any:
            recorder.recomputing = recorder.segment.phase == "backward"
            try:
                return named(*args, **kwargs)
            finally:
                recorder.recomputing = False

        def block(*args: Any, **kwargs: Any) -> Any:
            recorder.entered(unit, (args, kwargs))
            if again:
                output = checkpoint(recomputed, *args, use_reentrant=False, **kwargs)
            else:
                output = named(*args, **kwargs)
            recorder.left(unit, output)
            return output

        return block

    def _check_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        unused = [name for name, parameter in parameters.items() if parameter.grad is None]
        if unused:
            raise MissingRule(
                f"{len(unused)} parameters get no gradient ({', '.join(unused[:3])}); DDP would fail on them: leave "
                "them out of the module, or use them in the loss.",
                kind="a module with parameters that get no gradient",
            )


def _cast(inputs: Any, dtype: torch.dtype) -> Any:
    """The inputs as they are called with, floats in the weights' type, as FSDP2 casts them."""
    leaves, spec = tree_flatten(inputs)
    found = [
        leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() and dtype != torch.float32 else leaf
        for leaf in leaves
    ]
    return tree_unflatten(found, spec)


def _resized(leaf: Tensor, was: Point, point: Point, follows: bool) -> Tensor:
    """An input at another size; integers are repeated, floats have shapes only."""
    shape = list(leaf.shape)
    if shape and shape[0] == was[0]:
        shape[0] = point[0]
    if follows:
        shape[1] = point[1]
    if leaf.is_floating_point() or leaf.is_complex() or leaf.is_meta:
        return torch.empty(shape, dtype=leaf.dtype, device="meta")
    repeats = [-(-new // max(old, 1)) for new, old in zip(shape, leaf.shape, strict=True)]
    return leaf.detach().cpu().repeat(repeats)[tuple(slice(n) for n in shape)].contiguous()


def _without_values(tensor: Tensor, recorder: Recorder, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor like this one, on tensors without data; integers are known."""
    with recorder:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype)
    if isinstance(made, FakeTensor) and not tensor.is_meta and not tensor.is_floating_point() and not tensor.is_complex():
        made.real_tensor = tensor.detach().clone()
    return made


@contextmanager
def _without_data(
    module: nn.Module, recorder: Recorder, weights: torch.dtype
) -> Iterator[dict[str, nn.Parameter]]:
    """The module's parameters, of type `weights`, and its buffers have shapes only, and the module trains."""
    own: list[tuple[dict[str, Any], dict[str, Any]]] = []
    training = {one: one.training for one in module.modules()}
    made: dict[int, Any] = {}
    try:
        for one in module.modules():
            for table in (one._parameters, one._buffers):
                own.append((table, dict(table)))
        for table, before in own:
            for name, tensor in before.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    is_parameter = isinstance(tensor, nn.Parameter)
                    fake = _without_values(tensor.detach(), recorder, weights if is_parameter else None)
                    recorder.known(fake)
                    made[id(tensor)] = nn.Parameter(fake) if is_parameter else fake
                table[name] = made[id(tensor)]
        module.train()
        with ExitStack() as stack:
            for change in _passing_by(recorder):
                stack.enter_context(change)
            yield dict(module.named_parameters())
    finally:
        for table, before in own:
            table.update(before)
        for one, was in training.items():
            one.training = was


def _passing_by(recorder: Recorder) -> Iterator[Any]:
    """What passes the dispatcher by, or asks whether tensors have data.

    Source: torch/utils/checkpoint.py (`fwd_cpu_state`); transformers.utils.import_utils (`is_fake_tensor`).
    """
    random_state = torch.get_rng_state

    def random_state_seen() -> Tensor:
        state = random_state()
        recorder.seen(state, "get_rng_state")
        return state

    def listed(tensor: FakeTensor) -> Any:
        return known_value(tensor).tolist()

    yield patch.object(torch, "get_rng_state", random_state_seen)
    yield patch.object(FakeTensor, "tolist", listed)
    asks = sys.modules.get("transformers.utils.import_utils")
    if asks is not None and hasattr(asks, "is_fake_tensor"):
        yield patch.object(asks, "is_fake_tensor", lambda tensor: False)


# --- Recordings ---


def _recordings(
    tracer: _Tracer, runs: Sequence[tuple[str, str]]
) -> tuple[dict[Variant, Recording], Point | None]:
    """Each variant of the module, for any size if rules are found, else for the example's.

    Raises:
        Unlike: the blocks are not equal.
    """
    point = tracer.asked.point
    recomputes = ("none", "full") if tracer.blocks else ("none",)
    variants = [(weights, autocast, again) for weights, autocast in runs for again in recomputes]
    short = _lengths(tracer.asked)
    try:
        found: dict[Variant, Recording] = {}
        for i, variant in enumerate(variants):
            for alone, batches in ((False, (2, 3)), (True, (1, 1))):
                points = list(dict.fromkeys(zip(batches, short, strict=True)))
                if i == 0 and (point[0] == 1) is alone and point[0] * point[1] ** 2 <= MOST_MASKED:
                    points = list(dict.fromkeys((*points, point)))
                found[Variant(*variant, alone)] = recording_of(
                    [tracer.run(each, *variant) for each in points], points
                )
        return found, None
    except (MissingRule, Unlike):
        found = {
            Variant(*variant, point[0] == 1): recording_of([tracer.run(point, *variant)], [point])
            for variant in variants
        }
        return found, point


def _lengths(asked: Asked) -> Point:
    """The two lengths that are traced."""
    length = asked.point[1]
    if not any(asked.has_sequence):
        return (1, 1)
    if length >= max(LENGTHS):
        return LENGTHS
    if length < 4:
        raise InvalidValue(f"the example's sequence has {length} tokens; give one of 4 or more.")
    return (length * 3 // 4, length)


def _model(
    tracer: _Tracer,
    recordings: dict[Variant, Recording],
    limits: Point | None,
    name: str,
    max_seq_len: int | None,
) -> TracedModel:
    asked = tracer.asked
    named = {id(p): n for n, p in asked.module.named_parameters()}
    before: list[TracedTensor] = []
    block: dict[str, TracedTensor] = {}
    after: list[TracedTensor] = []
    for parameter_name, parameter in asked.module.named_parameters():
        common = tracer.common(parameter_name)
        tensor = TracedTensor(common, _fixed(parameter), "float32")
        if common != parameter_name:
            block.setdefault(common, tensor)
        else:
            (after if block else before).append(tensor)
    config = getattr(asked.module, "config", None)
    known = getattr(config, "max_position_embeddings", None)
    longest = max_seq_len or (known if isinstance(known, int) else None) or asked.point[1]
    return TracedModel(
        name=name or type(asked.module).__name__,
        n_layers=len(tracer.blocks),
        max_seq_len=checked_count("max_seq_len", longest),
        tied_head=len(named) < sum(1 for _ in asked.module.named_parameters(remove_duplicate=False)),
        blocks=f"{tracer.path}.*" if tracer.path else "",
        embed_parameters=tuple(before),
        block_parameters=tuple(block.values()),
        head_parameters=tuple(after),
        module_buffers=tuple(
            [TracedTensor(name, _fixed(one), _name(one)) for name, one in asked.module.named_buffers()]
        ),
        inputs_of_step=tuple(_inputs_of_step(asked)),
        recordings=recordings,
        device="cpu",
        made_with=_made_with(asked.module),
        has_sequence=any(asked.has_sequence),
        limits=limits,
    )


def _fixed(tensor: Tensor) -> tuple[Any, ...]:
    return tuple([size_of([n], [(1, 1)]) for n in tensor.shape])


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _inputs_of_step(asked: Asked) -> Iterator[TracedTensor]:
    points = [(2, 4), (3, 6), asked.point]
    seen: set[int] = set()
    for leaf, name, follows in zip(asked.leaves, asked.names, asked.has_sequence, strict=True):
        if isinstance(leaf, Tensor) and id(leaf) not in seen:
            seen.add(id(leaf))
            shapes = [
                _resized(torch.empty_like(leaf, device="meta"), asked.point, point, follows).shape
                for point in points
            ]
            shape = tuple([size_of(dims, points) for dims in zip(*shapes, strict=True)])
            yield TracedTensor(name, shape, _name(leaf))


def _made_with(module: nn.Module) -> str:
    """The releases of torch and of the module's own package."""
    package = type(module).__module__.partition(".")[0]
    version = getattr(sys.modules.get(package), "__version__", None)
    own = f", {package} {version}" if package != "torch" and isinstance(version, str) else ""
    return f"torch {torch.__version__.partition('+')[0]}{own}"
