"""DeepSpeed itself, set up from a plan; needs `pip install deepspeed` beside PyTorch.

On CPU ranks it trains, with DeepSpeed's CPU accelerator and CPU FusedAdam. Without a GPU one rank runs for
its bytes: CUDA kernels compute nothing there, so `patches` replaces the calls that read their results.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from memplan import Plan
from memplan.engines.deepspeed.options import DEEPSPEED_VERSION
from memplan.errors import MemplanError, PlanRefused
from memplan.models import Decoder
from memplan.models.llama import Llama
from memplan.models.torchtitan import TorchtitanLlama
from memplan.tracing.torchtitan import rotations
from validate.cases import Case
from validate.standin import materialised
from validate.systems import Training
from validate.systems.deepspeed.patches import without_kernels, without_shared_memory
from validate.systems.deepspeed.pipeline import pipelined
from validate.systems.deepspeed.tensor_parallel import agree, on_the_host
from validate.systems.deepspeed.training import DeepSpeedTraining, axes_of, configuration
from validate.systems.deepspeed.ulysses import divided_sequences, losses_of_pieces
from validate.systems.torch import modules
from validate.systems.torch.modules import Transformer
from validate.systems.torch.parallelize import stage_module, torch_dtype
from validate.systems.whole import losses, module_of_others


def prepared(case: Case, rank: int, device: torch.device) -> Training:
    """The case's engine on this rank.

    Raises:
        MemplanError: where DeepSpeed is not installed.
        PlanRefused: on a real GPU, and for a rank of a world that is not there on a CPU.
    """
    if find_spec("deepspeed") is None:
        raise MemplanError(
            f"engine='deepspeed' is run by DeepSpeed itself; use pip install deepspeed=={DEEPSPEED_VERSION}."
        )
    if (case.device, case.rank is None) not in (("nogpu", False), ("cpu", True)):
        raise PlanRefused(
            "engine='deepspeed' is run on CPU ranks, or without a GPU, one rank of a world; use the suite "
            "deepspeed, or gpu-deepspeed with --device nogpu."
        )
    plan, at = case.plan, case.plan.place(rank)
    os.environ.update(_ranks(plan, rank))
    if case.computes:
        os.environ["DS_ACCELERATOR"] = "cpu"
    config = configuration(plan, case.learning_rate)
    with without_shared_memory() if case.computes else without_kernels():
        import deepspeed

        deepspeed.init_distributed(dist.get_backend(), verbose=False, dist_init_required=False)
        if plan.pp > 1:
            return pipelined(case, at, device, config)
        module = _module(case, device, config)
        groups = divided_sequences(module, plan)
        engine, *_ = deepspeed.initialize(
            model=module,
            config=config,
            mpu=groups,
            model_parameters=[one for one in module.parameters() if one.requires_grad],
        )
    if plan.tp > 1:
        agree(engine)
    of_rank = losses if groups is None else losses_of_pieces
    return DeepSpeedTraining(engine, plan, of_rank(case, engine, at, device), axes_of(plan, groups))


def _ranks(plan: Plan, rank: int) -> dict[str, str]:
    """What a launcher tells a rank."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(plan.world_size),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": str(min(plan.world_size, 8)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }


def _module(case: Case, device: torch.device, config: dict[str, Any]) -> nn.Module:
    """The model in the type that DeepSpeed makes it, on the device; under ZeRO-3 in partitions.

    Where its values mean something it has the weights of the case's seed, whole: `initialize` divides them.
    """
    import deepspeed

    model, plan = case.model, case.plan
    half = torch_dtype(plan.formats.compute)
    if case.computes:
        own = stage_module(cast(Decoder, model), plan, 0, seed=case.seed, device=device)
        own.recompute, own.recompute_blocks = plan.recompute, plan.recompute_blocks
        for one in own.parameters():
            one.data = one.data.to(half)
        return own
    with ExitStack() as stack:
        if plan.zero == 3:
            stack.enter_context(_in_float32(case, device))
            stack.enter_context(deepspeed.zero.Init(config_dict_or_path=config, dtype=half))
        stack.enter_context(device if plan.zero == 3 else torch.device("meta"))
        made: nn.Module = module_of_others(case) if case.is_of_others else _own(cast(Decoder, model), plan)
    made.train()
    for one in made.parameters():
        one.data = one.data.to(half)
    return on_the_host(made) if plan.tp > 1 else materialised(made, device)


@contextmanager
def _in_float32(case: Case, device: torch.device) -> Iterator[None]:
    """A block in which `zero.Init` makes rotary angles in their own type: memplan's are made before."""
    model = case.model
    with ExitStack() as stack:
        if case.is_of_others:
            integration = import_module("transformers.integrations.deepspeed")
            stack.enter_context(integration.prevent_arange_dtype_change())
        elif isinstance(model, Llama | TorchtitanLlama):
            angles = rotations(case.plan.seq_len, model.d_head, model.rope_theta, device)
            stack.enter_context(patch.object(modules, "rotations", lambda *_: angles))
        yield


def _own(model: Decoder, plan: Plan) -> Transformer:
    """The model in memplan's own modules."""
    made = Transformer(model, range(model.n_layers), seq_len=plan.seq_len)
    made.recompute, made.recompute_blocks = plan.recompute, plan.recompute_blocks
    return made
