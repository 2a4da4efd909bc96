"""torchtitan's mixtures of experts: its own modules, made from a config.json and divided by its own code.

Its attention is `ScaledDotProductAttention`, which torchtitan 0.3.0 has for models without masks of packed
documents: FlexAttention's kernel is compiled and is not traced. Its loss is computed of all tokens at once.

Source: torchtitan 0.3.0, torchtitan/models/qwen3, torchtitan/models/deepseek_v3, torchtitan/models/common.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any, Final, cast
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import set_checkpoint_early_stop

from memplan.checks import checked_count
from memplan.device import DeviceType
from memplan.errors import MissingRule, installed, shown_value
from memplan.mesh import Group, degrees_text
from memplan.models.config import Config
from memplan.models.recording import EXPERTS, Term, TracedTensor
from memplan.models.traced import TracedModel
from memplan.tracing.cache import without_remarks
from memplan.tracing.cuda import CUDA
from memplan.tracing.divided import dealt_out
from memplan.tracing.example import checked_example
from memplan.tracing.torchtitan import token_loss
from memplan.tracing.tracer import LENGTHS, USUAL, checked_mesh, traced
from memplan.tracing.values import make_known

BACKEND: Final = "partial_dtensor"
"""How torchtitan divides modules where PyTorch is of a release: its default needs a newer one."""


def traced_mixture(
    config: Config,
    name: str,
    device: DeviceType,
    precisions: Sequence[str],
    mesh: Mapping[Group, int] | None,
) -> TracedModel:
    """The mixture of a config.json as torchtitan runs it, over the expert-parallel ranks of a `mesh`.

    Raises:
        MissingPackage: torchtitan is not installed.
        MissingRule: a model, or an axis, for which there is no rule.
    """
    ranks = checked_mesh(mesh or {})
    if others := [axis for axis in ranks if axis != "ep"]:
        raise MissingRule(
            f"{degrees_text(ranks)} has no rule for torchtitan's mixture {name}; use {others[0]}=1, or "
            "transformers' code (leave implementation out).",
            kind=f"{others[0]} of torchtitan's mixtures",
        )
    seq_len = max(LENGTHS)
    with torchtitan_backend(), set_checkpoint_early_stop(False):
        module = mixture_of(config, seq_len)
        tokens, positions, targets = torch.zeros(3, 2, seq_len, dtype=torch.int64).unbind()
        inputs = {"tokens": tokens, "positions": positions}
        example = checked_example(module, inputs, token_loss, targets)
        runs_on = torch.device("cpu") if device == "cpu" else CUDA
        n_ranks = ranks.get("ep", 1)
        found = traced(
            example,
            runs_on,
            "layers",
            precisions or USUAL,
            config.value("max_position_embeddings", None),
            name,
            mesh=ranks,
            experts_within=True,
            parallelize=lambda one, played: divide(one, played, n_ranks, make_known),
        )
    buffers = [_of_length(one, seq_len) for one in found.module_buffers]
    return replace(found, module_buffers=tuple(buffers))


def _of_length(buffer: TracedTensor, seq_len: int) -> TracedTensor:
    """A buffer of the module; one of rotary angles has a row for each token of a sequence.

    Source: torchtitan/models/common/decoder.py (`Decoder.Config.update_from_config`).
    """
    if not buffer.name.endswith(".rope.cache"):
        return buffer
    return buffer._replace(shape=((Term(1, seq_power=1),), *buffer.shape[1:]))


@contextmanager
def torchtitan_backend() -> Iterator[None]:
    """A block in which torchtitan's modules are divided as PyTorch's releases can."""
    with installed("a mixture of torchtitan's", "torchtitan"), without_remarks():
        utils = import_module("torchtitan.distributed.utils")
    with patch.object(utils, "_spmd_backend", BACKEND):
        yield


def mixture_of(config: Config, seq_len: int) -> nn.Module:
    """torchtitan's module of a config.json, for sequences of a length, on `meta`.

    Raises:
        MissingRule: a model that torchtitan does not have, or not so.
    """
    kind = config.value("model_type", None)
    if kind not in MADE:
        raise MissingRule(
            f"torchtitan's mixtures that are known here are {', '.join(MADE)}, and model_type is {kind!r}; "
            "leave implementation out.",
            kind="a mixture that is none of torchtitan's",
        )
    with installed("a mixture of torchtitan's", "torchtitan"), without_remarks():
        settings = MADE[kind](config, seq_len)
        attention = import_module("torchtitan.models.common.attention")
    for layer in settings.layers:
        layer.attention.inner_attention = attention.ScaledDotProductAttention.Config()
    with torch.device("meta"):
        module: nn.Module = settings.build()
    return module


def _qwen3(config: Config, seq_len: int) -> Any:
    own, common = import_module("torchtitan.models.qwen3"), import_module("torchtitan.models.common")
    count = partial(_count, config)
    dim, vocabulary, head_dim = count("hidden_size"), count("vocab_size"), count("head_dim")
    _check_equals(config, {"decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False})
    settings = own.Qwen3Model.Config(
        vocab_size=vocabulary,
        dim=dim,
        norm=own._qwen3_norm(dim),
        tok_embeddings=common.Embedding.Config(num_embeddings=vocabulary, embedding_dim=dim),
        lm_head=common.Linear.Config(in_features=dim, out_features=vocabulary),
        layers=own._build_qwen3_moe_layers(
            n_layers=count("num_hidden_layers"),
            dim=dim,
            n_heads=count("num_attention_heads"),
            n_kv_heads=count("num_key_value_heads"),
            head_dim=head_dim,
            moe_hidden_dim=count("moe_intermediate_size"),
            num_experts=count(*EXPERTS),
            top_k=count("num_experts_per_tok"),
            attn_backend="flex",
            moe_comm_backend="standard",
            rope=common.CosSinRoPE.Config(dim=head_dim, max_seq_len=seq_len),
        ),
    )
    sharding = import_module("torchtitan.models.qwen3.sharding")
    sharding.set_qwen3_sharding_config(settings, enable_sp=True, enable_ep=True)
    return settings


def _deepseek_v3(config: Config, seq_len: int) -> Any:
    own, common = import_module("torchtitan.models.deepseek_v3"), import_module("torchtitan.models.common")
    count, value = partial(_count, config), config.value
    dim, vocabulary, rope_dim = count("hidden_size"), count("vocab_size"), count("qk_rope_head_dim")
    _check_equals(config, {"moe_layer_freq": 1, "tie_word_embeddings": False})
    settings = own.DeepSeekV3Model.Config(
        vocab_size=vocabulary,
        dim=dim,
        norm=common.RMSNorm.Config(normalized_shape=dim),
        tok_embeddings=common.Embedding.Config(num_embeddings=vocabulary, embedding_dim=dim),
        lm_head=common.Linear.Config(in_features=dim, out_features=vocabulary),
        layers=own._build_dsv3_layers(
            n_layers=count("num_hidden_layers"),
            n_dense_layers=count("first_k_dense_replace"),
            dim=dim,
            n_heads=count("num_attention_heads"),
            q_lora_rank=value("q_lora_rank", 0) or 0,
            kv_lora_rank=count("kv_lora_rank"),
            qk_nope_head_dim=count("qk_nope_head_dim"),
            qk_rope_head_dim=rope_dim,
            v_head_dim=count("v_head_dim"),
            mscale=1.0,
            dense_hidden_dim=count("intermediate_size"),
            moe_hidden_dim=count("moe_intermediate_size"),
            num_experts=count(*EXPERTS),
            num_shared_experts=count("n_shared_experts"),
            router_top_k=count("num_experts_per_tok"),
            router_score_func="sigmoid",
            router_num_expert_groups=value("n_group", None),
            router_num_limited_groups=value("topk_group", None),
            router_route_scale=value("routed_scaling_factor", 1.0),
            router_route_norm=value("norm_topk_prob", True),
            attn_backend="flex",
            moe_comm_backend="standard",
            non_blocking_capacity_factor=None,
            rope=common.ComplexRoPE.Config(dim=rope_dim, max_seq_len=seq_len),
        ),
    )
    sharding = import_module("torchtitan.models.deepseek_v3.sharding")
    sharding.set_deepseek_v3_sharding_config(settings, enable_sp=True, enable_ep=True)
    return settings


MADE: Final[Mapping[str, Callable[[Config, int], Any]]] = {"qwen3_moe": _qwen3, "deepseek_v3": _deepseek_v3}
"""How torchtitan's settings are made of a config.json, by its `model_type`."""


def _count(config: Config, *keys: str) -> int:
    """The count of the first of these keys that a config.json has."""
    found = next((config.values[key] for key in keys if config.values.get(key) is not None), None)
    return checked_count(keys[0], found, least=0)


def _check_equals(config: Config, expected: Mapping[str, Any]) -> None:
    for key, known in expected.items():
        if (found := config.value(key, known)) != known:
            raise MissingRule(
                f"{key}={shown_value(found)}: torchtitan's mixtures have {shown_value(known)}; leave "
                "implementation out.",
                kind=f"{key} that torchtitan's mixtures do not have",
            )


Write = Callable[[Tensor, npt.NDArray[np.int64]], None]
"""Writes the numbers of experts into a tensor, one after the other."""


def divide(module: nn.Module, ranks: Mapping[str, Any], n_ranks: int, write: Write) -> None:
    """Divide a mixture of torchtitan over its expert-parallel ranks, as its `parallelize_fn` does.

    `ranks`: the `DeviceMesh` of each axis, by name. Tokens choose all experts equally often (`route_evenly`).

    Source: torchtitan/models/qwen3/parallelize.py (`parallelize_qwen3`).
    """
    dims = import_module("torchtitan.distributed").ParallelDims(
        dp_replicate=1, dp_shard=n_ranks, cp=1, tp=1, pp=1, ep=n_ranks,
        world_size=n_ranks, spmd_backend=BACKEND,
    )  # fmt: skip
    dims._single_axis_meshes = {axis: ranks[axis] for axis in ("ep", "tp")}
    cast(Any, module).parallelize(dims)
    route_evenly(module, n_ranks, write)


def route_evenly(module: nn.Module, n_ranks: int, write: Write) -> None:
    """Let routers choose all experts equally often: `write` puts their numbers into what was chosen."""
    for router in module.modules():
        if type(router).__name__ == "TokenChoiceTopKRouter":
            router.register_forward_hook(partial(_routed, n_ranks=n_ranks, write=write))


def _routed(router: Any, _: Any, output: Any, *, n_ranks: int, write: Write) -> None:
    _, chosen, _ = output
    write(chosen, dealt_out(chosen.numel(), router.num_experts, n_ranks))
