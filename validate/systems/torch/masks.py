"""Integers on a GPU that is not there, where kernels compute nothing.

How many places a mask chooses is stated; the sizes of images are computed on the host beside.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, Final
from unittest.mock import patch

import torch
from torch.utils._pytree import tree_flatten, tree_map_only


@cache
def masks_as_on_a_gpu(n_chosen: Callable[[torch.Tensor], int]) -> torch.library.Library:
    """Let masks on a GPU that is not there choose as many places as `n_chosen` says.

    How many places a mask chooses is read from the GPU, which here has no values. The places get their bytes
    all the same, without the memory that CUB takes to find them.
    """
    library = torch.library.Library("aten", "IMPL")

    def places(mask: torch.Tensor) -> torch.Tensor:
        mask = mask.contiguous()  # as the kernel holds it, until it has found the places
        none = torch.empty(0, dtype=torch.int64, device=mask.device)
        torch.ops.aten.nonzero.out(mask, out=none)
        return torch.empty((mask.dim(), n_chosen(mask)), dtype=torch.int64, device=mask.device).t()

    library.impl("nonzero", places, "CUDA")
    return library


def images_as_on_a_gpu(share: float) -> None:
    """Let images take this share of all tokens on a GPU that is not there.

    transformers compares the number of tokens that stand for images with the features that it made, and fails
    where a GPU has no values; the comparison is left out, which allocates nothing.

    Source: transformers.utils.import_utils (`torch_compilable_check`).
    """
    if share:
        os.environ["TRANSFORMERS_DISABLE_TORCH_CHECK"] = "1"
        masks_as_on_a_gpu(partial(_share_of, share))


def _share_of(share: float, mask: torch.Tensor) -> int:
    return round(mask.numel() * share)


class Known(torch.Tensor):
    """Integers on a GPU whose values are known on the host too, where Python code reads them.

    What follows from such tensors alone is known as well. Only Python's functions see that they are of
    another class: PyTorch's C++ code runs as ever.
    """

    on_host: torch.Tensor

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """The function's result on the GPU, with its values; what it reads is read on the host."""
        named = dict(kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            if func is torch.Tensor.__iter__:
                return iter(
                    [_known(one, host) for one, host in zip(args[0].unbind(), _host(args[0]), strict=True)]
                )
            known = all(isinstance(one, cls) for one in tree_flatten((args, named))[0] if _is_tensor(one))
            if func in READS and known:
                return func(*tree_map_only(cls, _host, args), **named)
            if func is torch.repeat_interleave and known:
                named["output_size"] = int(_host(args[1]).sum())
            found = INSTEAD.get(func, func)(*args, **named)
            given, _ = tree_flatten(found)
            counted = [one for one in given if _is_tensor(one) and not one.is_floating_point()]
            if not (known and counted) or func in WRITES:
                return found
            device = {"device": "cpu"} if "device" in named else {}
            named.pop("output_size", None)
            values = func(*_on_host(args), **{**_on_host(named), **device})
            if func is torch.unique_consecutive:
                found.resize_(values.shape)  # there is room for all
            return _each_known(found, values)


READS: Final = (
    torch.Tensor.tolist,
    torch.Tensor.item,
    torch.Tensor.__bool__,
    torch.Tensor.__int__,
    torch.Tensor.__index__,
)
"""What reads values."""

INSTEAD: Final = {torch.Tensor.prod: torch.Tensor.sum}
"""What allocates as much as a function whose kernel is compiled for the GPU that there is."""

WRITES: Final = (torch.Tensor.__setitem__, torch.Tensor.copy_)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _host(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.on_host
    return found


def _on_host(values: Any) -> Any:
    moved = tree_map_only(Known, _host, values)
    return tree_map_only(torch.device, lambda _: torch.device("cpu"), moved)


def _known(tensor: torch.Tensor, on_host: torch.Tensor) -> torch.Tensor:
    found = tensor.as_subclass(Known)
    found.on_host = on_host
    return found


def _each_known(found: Any, values: Any) -> Any:
    if isinstance(found, tuple | list):
        return type(found)([_each_known(one, host) for one, host in zip(found, values, strict=True)])
    return _known(found, values) if _is_tensor(found) else found


def known_inputs(
    inputs: Mapping[str, torch.Tensor], on_host: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The inputs of a step, with the values of integers where a GPU is asked for the sizes of images."""
    of_images = "image_grid_thw" in inputs
    names = [name for name in inputs if of_images and name not in ("labels", "pixel_values")]
    return {**inputs, **{name: _known(inputs[name], on_host[name]) for name in names}}


@contextmanager
def constants_known() -> Iterator[None]:
    """A block in which the integers that Python code moves to a GPU are known."""
    made = torch.tensor

    def tensor(data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        found = made(data, *args, **kwargs)
        is_counted = isinstance(data, list) and all(isinstance(one, int) for one in data)
        return _known(found, made(data, dtype=found.dtype)) if found.is_cuda and is_counted else found

    with patch.object(torch, "tensor", tensor):
        yield
