"""What DeepSpeed is told where there is no GPU; each patch says why it changes no byte."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch._dynamo  # noqa: F401  # transformers would import it inside zero.Init, whose constructors it refuses


def _does_nothing(*_: Any) -> None:
    """FusedAdam's kernel: it works in place and allocates nothing; compiled, it gave the same bytes."""


@contextmanager
def without_kernels() -> Iterator[None]:
    """DeepSpeed's CUDA kernel of FusedAdam is not compiled, but replaced by one that does nothing."""
    from deepspeed.ops.op_builder import FusedAdamBuilder

    def load(self: Any, verbose: bool = True) -> SimpleNamespace:
        return SimpleNamespace(multi_tensor_adam=_does_nothing)

    with patch.dict("os.environ", DS_SKIP_CUDA_CHECK="1"), patch.object(FusedAdamBuilder, "load", load):
        yield
