"""torchtitan's mixtures of experts: its own modules, split, divided and sharded by its own functions."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from memplan import Plan, TracedModel
from memplan.models.config import Config
from memplan.models.presets import preset
from memplan.models.recording import MIXTURE
from memplan.plan import stage_layers
from memplan.shapes import FP32
from memplan.tracing.torchtitan_mixtures import BACKEND, divide, mixture_of, route_evenly, traced_mixture
from validate.standin import materialised
from validate.systems.torch.parallelize import torch_dtype

_WIDTHS: Final = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "moe_intermediate_size": 48,
    "num_experts_per_tok": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 128,
    MIXTURE: True,
}

MIXTURES: Final[Mapping[str, dict[str, Any]]] = {
    "titan-qwen3-moe": {
        **_WIDTHS, "model_type": "qwen3_moe", "num_hidden_layers": 4, "num_key_value_heads": 2,
        "head_dim": 16, "num_experts": 8,
    },
    "titan-deepseek-v3-small": {
        **_WIDTHS, "model_type": "deepseek_v3", "num_hidden_layers": 6, "intermediate_size": 176,
        "n_routed_experts": 8, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16, "v_head_dim": 32, "n_group": 4, "topk_group": 2,
        "first_k_dense_replace": 2, "n_shared_experts": 1,
    },
}  # fmt: skip
"""Small ones, as the values of a config.json."""

PUBLISHED_MIXTURES: Final = {"titan-qwen3-30b-a3b": "qwen3-30b-a3b", "titan-deepseek-v3": "deepseek-v3"}
"""Those of true size: the presets whose config.json they have."""

OF_TORCHTITAN: Final = frozenset({*MIXTURES, *PUBLISHED_MIXTURES})


def mixture_trace(name: str, mesh: Mapping[str, int]) -> TracedModel:
    """A mixture, traced over these expert-parallel ranks: with CPU's kernels, or of true size with CUDA's."""
    if name in PUBLISHED_MIXTURES:
        values = {**(preset(PUBLISHED_MIXTURES[name]).config_values() or {}), MIXTURE: True}
        found = traced_mixture(Config(values), name, "cuda", ("bf16-mixed",), mesh)
    else:
        values = MIXTURES[name]
        found = traced_mixture(Config(values), name, "cpu", ("fp32", "bf16-mixed"), mesh)
    return replace(found, config=json.dumps(values, sort_keys=True))


def mixture_inputs(
    vocabulary: int, samples: int, seq_len: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """What a mixture is called with, and the targets of the loss."""
    text = torch.randint(vocabulary, (samples, seq_len + 1), generator=generator)
    positions = torch.arange(seq_len).expand(samples, seq_len).contiguous()
    return {"tokens": text[:, :-1].clone(), "positions": positions, "targets": text[:, 1:].clone()}


def mixture_stage(
    model: TracedModel,
    plan: Plan,
    stage: int,
    mesh: DeviceMesh | None,
    experts: DeviceMesh | None,
    device: torch.device,
) -> nn.Module:
    """One pipeline stage of a mixture of experts, split and parallelized by torchtitan's own functions.

    Without a pipeline it is the whole model.

    Source: torchtitan/distributed/pipeline_parallel.py (`pipeline_llm`),
    torchtitan/models/qwen3/parallelize.py (`parallelize_qwen3`).
    """
    import_module("torchtitan.distributed.utils").set_spmd_backend(BACKEND)
    module = mixture_of(Config(model.config_values() or {}), plan.seq_len)
    if plan.pp > 1:
        split = import_module("torchtitan.distributed.pipeline_parallel")._split_module
        module = split(module, _names(model, plan, stage))
    routing = _Routing(plan.ep)
    if experts is not None and mesh is not None:
        divide(module, {"ep": experts["ep"], "tp": mesh["tp"]}, plan.ep, routing.write)
    else:
        route_evenly(module, 1, routing.write)
    if device.type != "cpu":
        routing.count(module)
    if plan.recompute == "full":
        checkpointing = import_module("torchtitan.distributed.activation_checkpoint")
        checkpointing.FullAC.Config().build().apply(module)
    module.train()
    if plan.formats.stored != FP32:
        for parameter in module.parameters():
            parameter.data = parameter.data.to(torch_dtype(plan.formats.stored))
    if plan.fsdp and mesh is not None:
        _shard(module, plan, mesh, experts)
    return materialised(module, device)


class _Routing:
    """Lets routers choose all experts equally often, and counts so where no kernel computes."""

    def __init__(self, n_ranks: int) -> None:
        self.n_ranks, self.n_chosen = n_ranks, 0

    def write(self, chosen: Tensor, experts: npt.NDArray[np.int64]) -> None:
        """Write the experts' numbers into what a router has chosen."""
        self.n_chosen = chosen.numel()
        chosen.data.copy_(torch.from_numpy(experts).view(chosen.shape))

    def count(self, module: nn.Module) -> None:
        """Let dispatchers read equal counts of the rows that ranks exchange."""
        for one in module.modules():
            dispatcher = getattr(one, "token_dispatcher", None)
            if dispatcher is not None:
                dispatcher._sync_token_count_exchange = partial(
                    self._counted, dispatcher._sync_token_count_exchange
                )

    def _counted(self, exchange: Callable[..., Any], *args: Any) -> tuple[Any, list[int], list[int]]:
        counts, _, _ = exchange(*args)
        rows = [self.n_chosen // self.n_ranks] * self.n_ranks
        return counts, rows, [*rows]


def _names(model: TracedModel, plan: Plan, stage: int) -> list[str]:
    """The names of a stage's modules, as torchtitan's `module_fqns_per_model_part` has them."""
    blocks = [f"layers.{i}" for i in stage_layers(model.n_blocks, plan, stage)]
    first = ["tok_embeddings"] if stage == 0 else []
    return [*first, *blocks, *(["norm", "lm_head"] if stage == plan.n_stages - 1 else [])]


def _shard(module: nn.Module, plan: Plan, mesh: DeviceMesh, experts: DeviceMesh | None) -> None:
    """FSDP2's units, by torchtitan's own function."""
    replicas = ("dp_replicate",) if plan.dp_replicate > 1 else ()
    policy = "never" if plan.zero == 2 else "always" if plan.pp > 1 else "default"
    import_module("torchtitan.distributed.fsdp").apply_fsdp_to_decoder(
        cast(Any, module),
        mesh[(*replicas, "dp")] if replicas else mesh["dp"],
        param_dtype=torch_dtype(plan.formats.gather),
        reduce_dtype=torch_dtype(plan.formats.reduce),
        pp_enabled=plan.pp > 1,
        reshard_after_forward_policy=policy,
        ep_degree=plan.ep,
        edp_mesh=None if experts is None else experts[(*replicas, "efsdp")],
    )
    for unit in module.modules() if mesh.device_type == "cpu" else ():
        if isinstance(unit, FSDPModule):  # gloo has no sum that multiplies first, here by 1
            unit.set_force_sum_reduction_for_comms(True)
