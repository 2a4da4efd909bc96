"""The example to be traced: a module, its arguments, and the lists in it that may be equal blocks."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_flatten

from memplan.errors import InvalidValue, shown_value, unknown_name
from memplan.models.base import Role
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

    `point` is the example's batch and length. `by_trainer`: the loss is taken of the output outside
    autocast, and held beside what the backward pass starts from, as transformers' Trainer does it.
    `is_of_one_size`: other things happen at other batches and lengths, so that it is traced at its own.
    `before`: runs the module ahead of its forward pass, given the same inputs. `casts_inputs`: floats among
    these are cast to the type of the weights. `apart`: the path of a part that FSDP2 shards as a module of
    its own; "" for none. `hooks_again`: FSDP2's hooks in passes outside the module's own are recorded.
    `wraps_blocks`: blocks are recomputed by wrappers, of which the module knows nothing.
    `image_tokens`: how many tokens each sequence begins with that every size keeps, the last of which stands
    for a piece of an image.
    """

    module: nn.Module
    leaves: tuple[Leaf, ...]
    spec: Any
    is_mapping: bool
    has_targets: bool
    loss: Loss
    point: Point
    by_trainer: bool = False
    is_of_one_size: bool = False
    before: Callable[..., None] | None = None
    casts_inputs: bool = True
    apart: str = ""
    hooks_again: bool = False
    wraps_blocks: bool = False
    image_tokens: int = 0

    @property
    def has_sequence(self) -> bool:
        """Whether any input has one."""
        return any(leaf.has_sequence for leaf in self.leaves)

    @property
    def is_of_one_batch(self) -> bool:
        """Whether the module goes through the images of a batch one by one, as an input says their sizes."""
        return any(leaf.name in SIZES_OF_IMAGES for leaf in self.leaves)

    def at(self, point: Point) -> "Example":
        """The example at another batch and length."""
        leaves = [leaf._replace(value=self.resized(leaf, point)) for leaf in self.leaves]
        return replace(self, leaves=tuple(leaves), point=point)

    def resized(self, leaf: Leaf, point: Point) -> Any:
        """An input at another batch and length; integers are repeated, floats have shapes only.

        Tokens that stand for an image are not repeated: each sequence has them once.
        """
        value = leaf.value
        if not isinstance(value, Tensor):
            return value
        shape = list(value.shape)
        if shape and (shape[0] == self.point[0] or leaf.name == IMAGES):
            shape[0] = shape[0] // self.point[0] * point[0]
        if leaf.has_sequence:
            shape[1] = point[1]
        if value.is_floating_point() or value.is_complex() or value.is_meta:
            return torch.empty(shape, dtype=value.dtype, device="meta")
        given = value.detach().cpu()
        if leaf.has_sequence and self.image_tokens:
            text = given[:, self.image_tokens :]
            given = torch.cat([given, text.repeat(1, -(-shape[1] // text.shape[1]))], 1)
        repeats = [-(-new // max(old, 1)) for new, old in zip(shape, given.shape, strict=True)]
        return given.repeat(repeats)[tuple(slice(n) for n in shape)].contiguous()


def checked_example(
    module: nn.Module,
    example_inputs: Any,
    loss: Loss | None = None,
    targets: Tensor | None = None,
    sequence: Sequence[str | int] | None = None,
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
        image_tokens=_up_to_image(module, leaves),
    )


IMAGES: Final = "pixel_values"
"""The input of transformers' modules that holds images; each sample may have several rows of it."""

SIZES_OF_IMAGES: Final = ("image_grid_thw", "image_sizes")
"""Inputs of transformers' modules that say the size of each image, and have no sequence."""

IMAGE_TOKENS: Final = ("image_token_id", "image_token_index")
"""Names in transformers' configurations of the token that stands for a piece of an image."""


def image_tokens(config: Any) -> Iterator[int]:
    """The token that stands for a piece of an image, if a module of transformers has one."""
    return (found for key in IMAGE_TOKENS if isinstance(found := getattr(config, key, None), int))


def _up_to_image(module: nn.Module, leaves: Sequence[Leaf]) -> int:
    """The tokens of a sequence up to the last one that stands for a piece of an image; 0 without any.

    Raises:
        InvalidValue: no text follows them.
    """
    token = next(image_tokens(getattr(module, "config", None)), None)
    found = 0
    for leaf in leaves if token is not None else ():
        if leaf.name == "input_ids" and leaf.has_sequence and not leaf.value.is_meta:
            places = (leaf.value == token).nonzero()
            found = int(places[:, 1].max()) + 1 if len(places) else 0
            if found == leaf.value.shape[1]:
                raise InvalidValue(
                    f"input_ids end with the token of an image, {token}; give sequences that end with text."
                )
    return found


def _has_sequence(value: Any, name: str, place: int, asked: Sequence[str | int] | None) -> bool:
    if not isinstance(value, Tensor) or value.dim() < 2 or name in SIZES_OF_IMAGES:
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
    returned = "a tensor of many numbers" if isinstance(output, Tensor) else type(output).__name__
    raise InvalidValue(
        f"the module returns {returned}, which is no loss; give memplan.trace targets, or "
        "a loss that makes one number of the output: a factory returns "
        '{"module": ..., "example_inputs": ..., "loss": ...}.'
    )


@dataclass(frozen=True, slots=True, eq=False)
class Stack:
    """Modules that are units of FSDP2, by path: the blocks of a list, or a single module that is wrapped."""

    path: str
    blocks: Mapping[str, nn.Module]
    role: Role = "block"


def stacks_of(module: nn.Module, asked: str | Sequence[str] | None) -> Iterator[tuple[Stack, ...]]:
    """The stacks that a module may have, the most likely ones first; none of them last.

    They are the ones asked for; else what transformers wraps; else all lists of blocks of one class; else the
    list with the most parameters.

    Raises:
        UnknownName: what is asked for is no such list.
    """
    lists = {stack.path: stack for stack in _lists(module)}
    if asked is not None:
        paths = [path.strip() for path in asked.split(",")] if isinstance(asked, str) else asked
        for path in filter(None, paths):
            if path not in lists and not lists:
                raise InvalidValue(
                    f"blocks={shown_value(path)}: the module has no list of modules; leave it out."
                )
            if path not in lists:
                raise unknown_name("list of blocks", path, lists)
        yield tuple([lists[path] for path in paths if path])
        return
    largest_first = sorted(lists.values(), key=lambda one: -sum([p.numel() for p in _parameters(one)]))
    of_blocks = [stack for path, stack in lists.items() if _are_blocks(module.get_submodule(path))]
    inside = tuple([f"{block}." for stack in of_blocks for block in stack.blocks])
    outermost = [one for one in of_blocks if not one.path.startswith(inside)]
    likely = [_wrapped(module), tuple(outermost), *[(one,) for one in largest_first if _may_be_equal(one)]]
    yield from filter(None, dict.fromkeys(likely))
    yield ()


def _lists(module: nn.Module) -> Iterator[Stack]:
    """Lists of at least two modules with parameters of their own."""
    for path, one in module.named_modules():
        blocks = {f"{path}.{name}": block for name, block in one.named_children()}
        own = [id(p) for block in blocks.values() for p in block.parameters()]
        has_own = len({*own}) == len(own) and all(any(True for _ in b.parameters()) for b in blocks.values())
        is_list = isinstance(one, nn.ModuleList | nn.Sequential | nn.ModuleDict) and len(blocks) > 1
        if path and is_list and has_own:
            yield Stack(path, blocks)


def _wrapped(module: nn.Module) -> tuple[Stack, ...]:
    """What transformers wraps in units of FSDP2: the outermost modules of the classes that are not split.

    A single one whose weights have other names too, as a head's, is left to the root.

    Source: transformers.modeling_utils (`PreTrainedModel._no_split_modules`), accelerate.utils.fsdp_utils
    (`fsdp2_prepare_auto_wrap_policy`).
    """
    classes = getattr(module, "_no_split_modules", None) or ()
    found: dict[str, dict[str, nn.Module]] = {}
    outer = "."
    for path, one in module.named_modules():
        if path and type(one).__name__ in classes and not path.startswith(outer):
            outer = f"{path}."
            parent, _, name = path.rpartition(".")
            found.setdefault(parent if name.isdecimal() else path, {})[path] = one
    names = Counter([id(p) for _, p in module.named_parameters(remove_duplicate=False)])
    return tuple(
        [
            Stack(path, blocks, "module" if [*blocks] == [path] else "block")
            for path, blocks in found.items()
            if [*blocks] != [path] or all(names[id(p)] == 1 for p in blocks[path].parameters())
        ]
    )


def _parameters(stack: Stack) -> Iterator[nn.Parameter]:
    return (parameter for block in stack.blocks.values() for parameter in block.parameters())


def _are_blocks(owner: nn.Module) -> bool:
    """Whether a list has modules of one class, made of others: blocks, if perhaps of several kinds."""
    blocks = [*owner.children()]
    classes = {type(block) for block in blocks if any(True for _ in block.children())}
    return isinstance(owner, nn.ModuleList | nn.ModuleDict) and classes == {type(blocks[0])}


def structure_of(block: nn.Module) -> tuple[tuple[str, torch.Size, torch.dtype, bool], ...]:
    """Names, shapes and types of a block's parameters, and whether they are trained."""
    return tuple([(name, p.shape, p.dtype, p.requires_grad) for name, p in block.named_parameters()])


def _may_be_equal(stack: Stack) -> bool:
    """Whether blocks have parameters of equal names and shapes, the same of them frozen."""
    return len({structure_of(block) for block in stack.blocks.values()}) == 1
