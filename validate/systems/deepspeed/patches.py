"""Replacements of DeepSpeed's functions on CPU ranks and without a GPU, each with why it changes no byte."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch._dynamo  # noqa: F401  # transformers would import it inside zero.Init, whose constructors it refuses


def _does_nothing(*_: Any) -> None:
    """FusedAdam's kernel: it works in place and allocates nothing; compiled, it gave the same bytes."""


def _agreed(check: Callable[..., None]) -> Callable[..., None]:
    """A check that other ranks have the same order of modules: it is made, and its answer is yes."""

    def agreed(*args: Any) -> None:
        with suppress(RuntimeError):
            check(*args)

    return agreed


@contextmanager
def without_shared_memory() -> Iterator[None]:
    """CPU ranks of one machine reduce through gloo, as those of several do, not in memory that they share."""
    import deepspeed

    with patch.dict(deepspeed.ops.__compatible_ops__, deepspeed_shm_comm=False):
        yield


@contextmanager
def without_kernels() -> Iterator[None]:
    """No kernel of FusedAdam is compiled, and ranks that are not there agree with this one."""
    from deepspeed.ops.op_builder import CPUAdamBuilder, FusedAdamBuilder
    from deepspeed.runtime.zero import partitioned_param_coordinator as coordinator

    def load(self: Any, verbose: bool = True) -> SimpleNamespace:
        return SimpleNamespace(multi_tensor_adam=_does_nothing)

    def load_for_cpu(self: Any, verbose: bool = True) -> SimpleNamespace:
        return SimpleNamespace(**dict.fromkeys(("create_adam", "adam_update", "destroy_adam"), _does_nothing))

    coordinator.assert_ints_same_as_other_ranks = _agreed(coordinator.assert_ints_same_as_other_ranks)
    with (
        patch.dict("os.environ", DS_SKIP_CUDA_CHECK="1"),
        patch.object(FusedAdamBuilder, "load", load),
        patch.object(CPUAdamBuilder, "load", load_for_cpu),
    ):
        yield
