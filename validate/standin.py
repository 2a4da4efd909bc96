"""One rank that stands in for all of them: every collective returns at once and moves nothing.

So a single process is any rank of any world. What it holds and what it sends are those of the real thing, to
the byte; what it computes is not: received tensors hold whatever was there. Two things play the other ranks:

- PyTorch's `fake` process group, on any device. `FakeWork` holds no tensor and no collective has scratch
  (gloo's have).
- `ProcessGroupNCCL` as it is, over the played libnccl (`validate.nogpu`), whose communicators need no peers:
  with NCCL's streams and what its handles hold.

Source: torch/csrc/distributed/c10d/FakeProcessGroup.hpp, torch/testing/_internal/distributed/fake_pg.py.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

WEIGHT_STD: Final = 0.02


NCCL_ID_BYTES: Final = 128
"""Source: nccl.h (`NCCL_UNIQUE_ID_BYTES`)."""


class StoreOfOne(dist.Store):
    """A store where no other rank has left anything: what NCCL's process group asks of it is answered.

    That is the communicator's unique id, which is zeros, and whether another rank has failed, which none has.

    Source: torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp (`broadcastUniqueNCCLID`, `HeartbeatMonitor`).
    """

    def clone(self) -> "StoreOfOne":
        """Itself: it is used by this process only."""
        return self

    def set(self, key: str, value: str) -> None:
        """Does nothing: no other rank reads it."""

    def get(self, key: str) -> bytes:
        """NCCL's unique id."""
        return bytes(NCCL_ID_BYTES)

    def check(self, keys: list[str]) -> bool:
        """Whether another rank has set these keys."""
        return False


@contextmanager
def stand_in(backend: str, rank: int, world_size: int, device: torch.device | None = None) -> Iterator[None]:
    """The group of all ranks, this one alone in it; NCCL's with its `device`.

    The store's Python object must live as long as the group, which knows it by its C++ part.
    """
    from torch.testing._internal.distributed import fake_pg  # registers the backend

    store = fake_pg.FakeStore() if device is None else StoreOfOne()
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, device_id=device)
    yield
    dist.destroy_process_group()


VOTES: Final = ("_warmup_forward_vote", "_warmup_backward_result")
"""How pipeline stages ask each other whether all know the shapes of what they receive (since torch 2.13).

Source: torch/distributed/pipelining/stage.py.
"""


@contextmanager
def unanimous() -> Iterator[None]:
    """Makes the votes of pipeline stages unanimous: all stages know the shapes, whatever was received.

    The answer is copied to the device: a GPU that is not there computes none.
    """

    def says_yes(vote: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def voted(*args: Any, **kwargs: Any) -> Tensor:
            result = vote(*args, **kwargs)
            return result.copy_(torch.ones(result.shape, dtype=result.dtype))

        return voted

    with ExitStack() as stack:
        for name in VOTES:
            if (vote := getattr(PipelineStage, name, None)) is not None:
                stack.enter_context(patch.object(PipelineStage, name, says_yes(vote)))
        yield


class WithResult:
    """A finished collective whose future has its result; a fake one's has none."""

    def __init__(self, result: Tensor) -> None:
        self._result = result

    def get_future(self) -> Future[list[Tensor]]:
        """Its result, as a list of one tensor."""
        done: Future[list[Tensor]] = Future()
        done.set_result([self._result])
        return done


def with_results(module: DistributedDataParallel, group: dist.ProcessGroup) -> None:
    """Lets DDP's reducer go on: it takes a bucket's sum from the collective's future; a fake one has none.

    The reducer's own all-reduce is in place, as is this one; the future holds the bucket, as it would.

    Source: torch/csrc/distributed/c10d/comm.cpp (`parseCommHookResult`), reducer.cpp (`finalize_backward`).
    """

    def all_reduced(group: dist.ProcessGroup, bucket: dist.GradBucket) -> Future[Tensor]:
        dist.all_reduce(bucket.buffer(), group=group)
        done: Future[Tensor] = Future()
        done.set_result(bucket.buffer())
        return done

    module.register_comm_hook(group, all_reduced)


def materialised(module: nn.Module, device: torch.device, *, offload: bool = False) -> nn.Module:
    """The module with real weights, drawn anew, where it had only shapes: this rank's part and no more.

    With `offload` its weights are on the host and its buffers on the device. Rotations are by no angle.
    """
    if not any(parameter.is_meta for parameter in module.parameters()):
        return module
    tied = _untied(module)
    there = torch.device("cpu") if offload else device

    def come(one: Tensor) -> Tensor:
        if one.is_meta:
            return torch.empty_like(one, device=there)
        one.data = one.data.to(there)  # quantized: before its scales
        moved = one.to(there)
        if hasattr(one, "SCB"):  # in eight bits: what its linear keeps is of another tensor now
            vars(one).update(vars(moved))
        return moved

    cast(Any, module)._apply(come)
    for name, first in tied.items():
        above, _, attribute = name.rpartition(".")
        module.get_submodule(above).register_parameter(attribute, module.get_parameter(first))
    for owner in module.modules():
        for name, buffer in owner.named_buffers(recurse=False):
            setattr(owner, name, buffer.to(device))
    for parameter in module.parameters():
        weight = parameter.detach()
        if not weight.is_floating_point():  # quantized, so it is there already
            continue
        nn.init.normal_(weight.to_local() if isinstance(weight, DTensor) else weight, std=WEIGHT_STD)
    for buffer in module.buffers():
        nn.init.ones_(buffer)
    return module


def _untied(module: nn.Module) -> dict[str, str]:
    """Takes out all uses of tied weights but the first; each use taken out, with the first one's name."""
    first: dict[nn.Parameter, str] = {}
    taken: dict[str, str] = {}
    for name, parameter in list(module.named_parameters(remove_duplicate=False)):
        if first.setdefault(parameter, name) != name:
            above, _, attribute = name.rpartition(".")
            module.get_submodule(above).register_parameter(attribute, None)
            taken[name] = first[parameter]
    return taken
