"""The example to be traced: a module, its arguments, and the lists in it that may be equal blocks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_flatten

from memplan.errors import InvalidValue, shown_value, unknown_name
from memplan.tracing.units import Point

Loss = Callable[..., Tensor]
"""From a module's output, and the targets if there are any, to a single number."""


class Leaf(NamedTuple):
    """An input or a target: its value, its name, and whether its second dim is the sequence."""

    value: Any
    name: str
    has_sequence: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A module and its arguments: `leaves` of the inputs and targets, whose tree is `spec`.

    `point` is the example's batch and length.
    """

    module: nn.Module
    leaves: tuple[Leaf, ...]
    spec: Any
    is_mapping: bool
    has_targets: bool
    loss: Loss
    point: Point

    @property
    def has_sequence(self) -> bool:
        """Whether any input has one."""
        return any(leaf.has_sequence for leaf in self.leaves)

    def resized(self, leaf: Leaf, point: Point) -> Any:
        """An input at another batch and length; integers are repeated, floats have shapes only."""
        value = leaf.value
        if not isinstance(value, Tensor):
            return value
        shape = list(value.shape)
        if shape and shape[0] == self.point[0]:
            shape[0] = point[0]
        if leaf.has_sequence:
            shape[1] = point[1]
        if value.is_floating_point() or value.is_complex() or value.is_meta:
            return torch.empty(shape, dtype=value.dtype, device="meta")
        repeats = [-(-new // max(old, 1)) for new, old in zip(shape, value.shape, strict=True)]
        return value.detach().cpu().repeat(repeats)[tuple(slice(n) for n in shape)].contiguous()


def checked_example(
    module: nn.Module,
    example_inputs: Any,
    loss: Loss | None,
    targets: Tensor | None,
    sequence: Sequence[str | int] | None,
) -> Example:
    """The example of a module and its arguments, checked.

    Raises:
        InvalidValue: for a module or an example that cannot be used, and why.
    """
    _check_module(module)
    example = (example_inputs,) if isinstance(example_inputs, Tensor) else example_inputs
    if not isinstance(example, Mapping | tuple | list):
        raise InvalidValue(
            f"example_inputs={shown_value(example)} is not allowed; give a tensor, a tuple, or a dict."
        )
    is_mapping = isinstance(example, Mapping)
    parts: dict[Any, Any] = dict(example) if isinstance(example, Mapping) else dict(enumerate(example))
    values, spec = tree_flatten((parts if is_mapping else tuple(parts.values()), targets))
    names = [str(key) if is_mapping else f"input {key}" for key in parts for _ in tree_flatten(parts[key])[0]]
    names += ["targets"] * (len(values) - len(names))
    if sequence is not None and (
        isinstance(sequence, str) or not {*sequence} <= {*names, *range(len(names))}
    ):
        raise InvalidValue(
            f"sequence={shown_value(sequence)} is not allowed; use a list of names or places of the inputs: "
            f"{', '.join(dict.fromkeys(names))}."
        )
    leaves = [
        Leaf(value, name, _has_sequence(value, name, place, sequence))
        for place, (value, name) in enumerate(zip(values, names, strict=True))
    ]
    first = next((value for value in values if isinstance(value, Tensor)), None)
    if first is None or not first.dim() or not first.shape[0]:
        raise InvalidValue("example_inputs hold no tensor with a batch as its first dim; give one that does.")
    lengths = {leaf.value.shape[1] for leaf in leaves if leaf.has_sequence}
    if len(lengths) > 1:
        raise InvalidValue(
            f"inputs have sequences of {sorted(lengths)}; name those with one length by sequence=[...]."
        )
    return Example(
        module=module,
        leaves=tuple(leaves),
        spec=spec,
        is_mapping=is_mapping,
        has_targets=targets is not None,
        loss=standard_loss if loss is None else loss,
        point=(first.shape[0], lengths.pop() if lengths else 1),
    )


def _check_sequence(asked: Sequence[str | int], names: Sequence[str]) -> None:
    known = {*names, *range(len(names))}
    if isinstance(asked, str) or not all(one in known for one in asked):
        raise InvalidValue(
            f"sequence={shown_value(asked)} is not allowed; use a list of names or places of the inputs: "
            f"{', '.join(dict.fromkeys(names))}."
        )


def _has_sequence(value: Any, name: str, place: int, asked: Sequence[str | int] | None) -> bool:
    if not isinstance(value, Tensor) or value.dim() < 2:
        return False
    if asked is not None:
        return name in asked or place in asked
    return not value.is_floating_point() and value.dim() == 2


def _check_module(module: nn.Module) -> None:
    if not isinstance(module, nn.Module):
        raise InvalidValue(f"module={shown_value(module)} is no torch.nn.Module; give one.")
    for path, one in module.named_modules():
        if isinstance(one, WRAPPERS) or hasattr(one, "_orig_mod") or one._compiled_call_impl is not None:
            raise InvalidValue(
                f"{path or 'the module'} is compiled or replicated ({type(one).__name__}): not its own code "
                "is what runs; trace the module that it was made of."
            )
    parameters = dict(module.named_parameters())
    if not parameters:
        raise InvalidValue(f"{type(module).__name__} has no parameters; there is nothing to train.")
    for name, tensor in (*parameters.items(), *module.named_buffers()):
        _check_tensor(name, tensor)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise InvalidValue(
            f"all parameters of {type(module).__name__} are frozen; train one (requires_grad_(True))."
        )


WRAPPERS: Final = (ScriptModule, nn.DataParallel, DistributedDataParallel)
"""Modules that run something else than a module's own code, as those of `torch.compile` do."""


def _check_tensor(name: str, tensor: Tensor) -> None:
    """Refuse a parameter or a buffer whose storage or gradient PyTorch treats in ways that are not traced."""
    is_parameter = isinstance(tensor, nn.Parameter)
    what = f"{'parameter' if is_parameter else 'buffer'} {name}"
    if is_lazy(tensor):
        raise InvalidValue(
            f"{what} has no shape yet; call the module once, so that lazy modules have theirs."
        )
    if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
        raise InvalidValue(
            f"{what} is a {type(tensor).__name__}, no plain tensor; trace the module before it is sharded or "
            "quantized."
        )
    narrow = tensor.is_floating_point() and tensor.itemsize == 1
    if tensor.is_quantized or (is_parameter and (tensor.is_complex() or narrow)):
        raise InvalidValue(f"{what} is of {tensor.dtype}; use real floats, or plain integers, frozen.")
    if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
        raise InvalidValue(f"{what} has hooks of its own, which cannot be traced; remove them.")


def standard_loss(output: Any, targets: Tensor | None = None) -> Tensor:
    """The output's own loss, the output if it is one number, or cross-entropy with the targets.

    Raises:
        InvalidValue: the output is none of these.
    """
    own = getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own
    if isinstance(output, Tensor) and output.dim() == 0:
        return output
    if isinstance(output, Tensor) and targets is not None:
        return F.cross_entropy(output.flatten(0, targets.dim() - 1), targets.flatten())
    raise InvalidValue(
        f"the module returns {type(output).__name__}, which is no loss; give memplan.trace targets, or "
        "a loss that makes one number of the output: a factory returns "
        '{"module": ..., "example_inputs": ..., "loss": ...}.'
    )


def block_lists(module: nn.Module, asked: str | None) -> Iterator[str]:
    """Paths of lists whose blocks may be equal, those with the most parameters first; "" for none.

    Raises:
        UnknownName: the one that is asked for is no such list.
    """
    lists: dict[str, list[nn.Module]] = {}
    for path, one in module.named_modules():
        found = list(one.children()) if isinstance(one, nn.ModuleList | nn.Sequential | nn.ModuleDict) else []
        if path and _may_be_equal(found):
            lists[path] = found
    if asked is not None:
        if asked and asked not in lists:
            raise unknown_name("list of equal blocks", asked, lists)
        yield asked
        return
    n_elements = {
        path: sum(p.numel() for block in found for p in block.parameters()) for path, found in lists.items()
    }
    yield from sorted(n_elements, key=lambda path: -n_elements[path])
    yield ""


def _may_be_equal(blocks: Sequence[nn.Module]) -> bool:
    """Whether blocks have parameters of their own, of equal names and shapes, the same of them frozen."""
    found = [[(name, p.shape, p.requires_grad) for name, p in block.named_parameters()] for block in blocks]
    own = [id(parameter) for block in blocks for parameter in block.parameters()]
    is_shared = len(set(own)) < len(own)
    return len(blocks) > 1 and bool(found[0]) and not is_shared and all(one == found[0] for one in found)
