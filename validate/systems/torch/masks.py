"""Masks on a GPU that is not there: how many places they choose is stated, as kernels compute nothing."""

import os
from collections.abc import Callable
from functools import cache, partial

import torch


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
