"""Blocks of several kinds and in several stacks: what is wrapped, gathered and recomputed."""

import json
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan import MissingRule, TracedModel
from memplan.engines.options import plan_of
from memplan.errors import MemplanError
from memplan.models.trace_from_json import model_from_trace
from memplan.tracing import tracer
from validate.cases import Case, architecture_traces, shipped_trace
from validate.judge import References, judged
from validate.systems.torch.architectures import small_module
from validate.systems.torch.wild import stacks_of, wild_named

pytest.importorskip("transformers")

WRAPPED = {"hf-deepseek-v3": 6, "hf-whisper": 8, "hf-vit-whole": 5, "hf-siglip-whole": 6}
"""Modules that transformers' own plan wraps, by the name of a trace on file.

SigLIP's last one is gathered ahead in the backward pass, and nobody waits for it.
"""
ON_RANKS: tuple[dict[str, Any], ...] = (
    {"dp": 2, "zero": 3, "precision": "fp32", "micro_batch": 2, "global_batch": 4},
    {"dp": 2, "zero": 3, "precision": "bf16-mixed", "recompute": "full", "micro_batch": 2, "global_batch": 4},
)


def gathers(model: TracedModel, **plan: Any) -> int:
    options = {"seq_len": 64 if model.has_sequence else 1, "precision": "fp32", "dp": 2, "zero": 3, **plan}
    e = memplan.estimate(model, device="cpu", **options)
    return sum(c.calls for c in e.collectives if c.kind == "all_gather")


@pytest.mark.parametrize("name", WRAPPED)
def test_what_transformers_does_not_split_is_what_is_gathered(name):
    module: Any = wild_named(name).module()
    own = [one for one in module.modules() if type(one).__name__ in module._no_split_modules]
    assert len(own) == WRAPPED[name]
    assert gathers(shipped_trace(name)) == 2 * len(own) + 1  # all but the root are gathered again


@pytest.mark.parametrize("plan", ON_RANKS, ids=str)
@pytest.mark.parametrize("name", WRAPPED)
def test_cpu_ranks_hold_and_send_what_is_predicted(name, plan):
    model = shipped_trace(name)
    case = Case(name=name, model=model, plan=plan_of(**plan, seq_len=64 if model.has_sequence else 1))
    record = judged(case, References())
    assert record.outcome in ("ok", "wrong-loss"), record.reason  # speech of noise is not learned in 6 steps
    assert record.states_off_bytes == record.collectives_off == 0
    assert abs(record.peak_error) < 1e-3


def test_position_biases_have_gradients_where_blocks_are_recomputed():
    """T5's zeros of cross-attention, which transformers makes a leaf then; without them 131,072 B too few."""
    plan = plan_of(micro_batch=2, seq_len=64, precision="fp32", recompute="full")
    record = judged(Case(name="t5", model=shipped_trace("hf-t5-deep"), plan=plan), References())
    assert (record.outcome, record.states_off_bytes, record.peak_error) == ("ok", 0, 0.0)


@pytest.mark.parametrize("dense, layers", [(0, (("blocks", 4),)), (1, (("blocks", 1), ("blocks 2", 3)))])
def test_dense_blocks_before_blocks_of_experts_are_units_too(tmp_path, dense, layers):
    config = {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
        "first_k_dense_replace": dense,
        "hidden_size": 64, "intermediate_size": 128, "kv_lora_rank": 16, "moe_intermediate_size": 32,
        "n_group": 1, "n_routed_experts": 4, "num_attention_heads": 4, "num_experts_per_tok": 2,
        "num_hidden_layers": 4, "num_key_value_heads": 4, "q_lora_rank": None, "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16, "topk_group": 1, "v_head_dim": 16, "vocab_size": 512,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    e = memplan.estimate(str(tmp_path), cluster="8xh100-sxm", zero=3, seq_len=64)
    assert isinstance(e.model, TracedModel)
    assert (e.model.n_layers, e.model.layers) == (4, layers)
    assert sum(c.calls for c in e.collectives if c.kind == "all_gather") == 9  # 1 with a dense block before
    e.model.save(tmp_path / "trace.json")
    assert model_from_trace(tmp_path / "trace.json") == e.model
    plans: list[dict[str, Any]] = [{}, {"dp": 2, "recompute_blocks": 2}]
    for plan in plans:
        again = memplan.estimate(e.model, recompute="full", seq_len=64, **plan).worst
        assert again.record.step.net_bytes == again.states.grads_bytes


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, width), nn.Linear(width, 16)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class TwoLists(nn.Module):
    """Two lists of blocks of one's own, the second one with wider blocks at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList([Block(32) for _ in range(3)])
        self.norm = nn.LayerNorm(16)
        self.second = nn.ModuleList([Block(width) for width in (32, 32, 64, 64)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.first:
            x = block(x)
        x = self.norm(x)
        for block in self.second:
            x = block(x)
        return x.sum()


@pytest.mark.parametrize(
    "blocks, n_layers, n_gathers",
    [(None, 7, 15), ("first", 3, 7), ("first,second", 7, 15), (["second"], 4, 9), ("", 0, 1)],
)
def test_ones_own_lists_are_units_as_they_are_named(blocks, n_layers, n_gathers):
    traced = memplan.trace(TwoLists(), torch.ones(4, 16), precisions=["fp32"], device="cpu", blocks=blocks)
    assert traced.n_layers == n_layers
    assert traced.n_parameters == sum(p.numel() for p in TwoLists().parameters())
    assert gathers(traced, seq_len=1) == n_gathers
    e = memplan.estimate(traced, cluster=None, seq_len=1, precision="fp32", dp=2, zero=3, device="cpu")
    assert any("--blocks model.layers" in note for note in e.notes) == (not n_layers)


class Scaled(TwoLists):
    """Two lists of blocks, and a scale without dims, as CLIP has it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


def test_a_parameter_without_dims_is_refused_as_fully_shard_refuses_it():
    """`_verify_managed_param`: "fully_shard doesn't support scalar parameters"; it was an IndexError."""
    traced = memplan.trace(Scaled(), torch.ones(4, 16), precisions=["fp32"], device="cpu")
    with pytest.raises(MemplanError, match=r"FSDP2 shards no parameter without dims, as is scale of Scaled"):
        gathers(traced, seq_len=1)
    gathers(traced, seq_len=1, zero=0)


def test_a_model_of_two_stacks_has_no_pipeline_and_is_recomputed_whole_or_not():
    traced = memplan.trace(TwoLists(), torch.ones(4, 16), precisions=["fp32"], device="cpu")
    plan: dict[str, Any] = {"device": "cpu", "seq_len": 1, "precision": "fp32"}
    assert traced.n_stacks == 2
    with pytest.raises(MissingRule, match=r"its blocks are in several stacks\); use pp=1"):
        memplan.estimate(traced, pp=2, global_batch=4, **plan)
    with pytest.raises(MissingRule, match=r"recompute_blocks=2.*several stacks"):
        memplan.estimate(traced, recompute="full", recompute_blocks=2, **plan)
    again = memplan.estimate(traced, recompute="full", **plan).worst
    assert again.record.step.net_bytes == again.states.grads_bytes


def test_a_pipeline_over_blocks_of_several_kinds_leaves_gradients_alone():
    module = nn.Sequential(nn.Linear(16, 16), nn.Sequential(*map(Block, (32, 32, 64, 64))), nn.Linear(16, 4))
    traced = memplan.trace(
        module, torch.ones(4, 16), loss=torch.sum, precisions=["fp32"], device="cpu", blocks="1"
    )
    assert traced.layers == (("blocks", 2), ("blocks 2", 1), ("blocks 3", 1)) or len(traced.layers) == 2
    for layers in ((2, 2), (1, 3), (3, 1)):
        e = memplan.estimate(
            traced, device="cpu", seq_len=1, precision="fp32", pp=2, global_batch=4, layers_per_stage=layers
        )
        of_narrow, of_wide = 4 * (2 * 16 * 32 + 48), 4 * (2 * 16 * 64 + 80)
        sizes = [of_narrow, of_narrow, of_wide, of_wide]
        first = sum(sizes[: layers[0]]) + 4 * 17 * 16
        assert [stage.states.grads_bytes for stage in e.stages] == [
            first,
            sum(sizes[layers[0] :]) + 4 * 17 * 4,
        ]
        for stage in e.stages:
            assert stage.record.step.net_bytes == stage.states.grads_bytes


class Children(nn.Module):
    """A module without blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.head = nn.Linear(16, 16), nn.Linear(16, 512), nn.Linear(512, 4)

    def forward(self, x):
        return self.head(self.body(self.stem(x)).relu()).sum()


@pytest.mark.parametrize("plan", [{}, {"dp": 2}, {"dp": 2, "zero": 3}], ids=str)
def test_the_peak_of_a_module_without_blocks_is_in_a_part_of_its_own(plan):
    traced = memplan.trace(Children(), torch.ones(4, 16), precisions=["fp32"], device="cpu")
    e = memplan.estimate(traced, device="cpu", seq_len=1, precision="fp32", micro_batch=4096, **plan)
    assert e.worst.when in ("forward: body", "forward: Children", "backward: head", "backward: body")
    assert "no repeated blocks" in str(e)


def test_padding_of_few_rows_is_told_with_a_way_out():
    """FSDP2 divides dim 0: eight fused experts over 64 ranks leave 56 ranks without any."""
    plan: dict[str, Any] = {"cluster": "64xh100-sxm", "zero": 3, "seq_len": 512}
    (note,) = [n for n in memplan.estimate("mixtral-8x7b", **plan).notes if "dim 0" in n]
    assert "has 8 rows (dim 0) for 64 shards: FSDP2 leaves 56 ranks without" in note
    assert "pads what is gathered 8 times" in note
    assert "dp_replicate=8, dp=8" in note
    for other in ({"dp_replicate": 8, "dp": 8}, {"dp": 8, "cluster": "8xh100-sxm"}):
        assert not [n for n in memplan.estimate("mixtral-8x7b", **(plan | other)).notes if "dim 0" in n]
    assert not [n for n in memplan.estimate("llama-3-8b", **plan).notes if "dim 0" in n]


PUBLISHED = {
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "deepseek-v3": 671_026_404_352,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "glm-4.5": 352_797_814_784,
    "glm-4.5-air": 106_852_245_504,
}
"""Parameters as published; of DeepSeek's and GLM's without the layer for multi-token prediction."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_of_experts_have_as_many_parameters_as_published(name):
    e = memplan.estimate(name, cluster="512xh100-sxm", zero=3, seq_len=4096, dp=64, dp_replicate=8)
    assert e.n_parameters == PUBLISHED[name]
    assert sum(c.calls for c in e.collectives if c.kind == "all_gather") == 2 * e.model.n_blocks + 1
    assert any("eager attention" in note for note in e.notes) == name.startswith("gpt-oss")


NESTED = ("hf-causal-falcon_mamba", "hf-causal-mamba")
"""Accelerate makes a unit of each mixer too, within its block's: a plan has the blocks."""

CALLED_AGAIN = ("hf-causal-hrm_text",)
"""Blocks that are called several times in a pass are no units of a plan, which says "no repeated blocks"."""

TIED_ENDS = ("bert", "camembert", "data2vec-text", "roberta", "xlm-roberta", "xlm-roberta-xl")
"""Accelerate makes a unit of embeddings with a weight of the head too; a plan leaves both to the root."""


def test_the_blocks_of_architectures_are_what_accelerate_wraps():
    utils = pytest.importorskip("accelerate.utils.fsdp_utils")
    plugin = pytest.importorskip("accelerate.utils").FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap"
    )
    checked, others = 0, set()
    for name in architecture_traces():
        with torch.device("meta"):
            module: Any = small_module(name)
        classes = {type(one).__name__ for one in module.modules()}
        if not module._no_split_modules or not {*module._no_split_modules} <= classes:
            continue  # Accelerate wraps nothing, or refuses a class that the module has not
        policy = utils.fsdp2_prepare_auto_wrap_policy(plugin, module)
        blocks = {id(block) for stack in stacks_of(module, shipped_trace(name)) for block in stack}
        checked += 1
        if blocks != {id(one) for one in module.modules() if policy(one)}:
            others.add(name)
    assert checked > 80
    assert others == {*NESTED, *CALLED_AGAIN, *[f"hf-causal-{kind}" for kind in TIED_ENDS]}


def cached_llama() -> tuple[Any, dict[str, Any]]:
    """A module that hands out its cache of keys and values, which transformers' default makes, and inputs."""
    transformers: Any = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=176, num_hidden_layers=12, num_attention_heads=4, vocab_size=320
    )
    assert config.use_cache
    ids = torch.ones(2, 64, dtype=torch.int64)
    return transformers.LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


def test_keys_and_values_that_an_output_holds_are_freed_in_every_block(tmp_path):
    """Under autocast the cache alone holds them, up to the loss; 12 layers are played by their first four."""
    found = memplan.trace(*cached_llama(), device="cpu", precisions=["fp32", "bf16-mixed"])
    found.save(tmp_path / "trace.json")
    assert model_from_trace(tmp_path / "trace.json") == found  # refused if not all of them are freed


def test_a_trace_that_does_not_free_what_it_allocates_is_refused(monkeypatch):
    monkeypatch.setattr(tracer, "_frees_in_one", lambda _: False)
    with pytest.raises(MissingRule, match=r"nothing frees '.*self_attn: cat'"):
        memplan.trace(*cached_llama(), device="cpu", precisions=["fp32", "bf16-mixed"])
