"""Megatron-DeepSpeed of 2022: what BigScience measured before BLOOM, its states, its arguments, refusals."""

from statistics import median
from typing import Any

import pytest

import memplan
from memplan.engines.megatron.bounds import data_parallelism
from memplan.engines.megatron.deepspeed import parameter_groups
from memplan.engines.options import plan_of
from memplan.errors import MissingRule, PlanRefused
from memplan.launchers import read
from memplan.models.megatron import GPTModel
from memplan.shapes import FP16, Parameter
from memplan.testing import check_laws
from validate.published import bigscience
from validate.published.order import rank_correlation

SMALL = GPTModel(
    name="small", d_model=64, max_seq_len=32, n_layers=4, n_heads=8, d_ff=256, vocab_size=512,
    tied_head=True, dropout=0.1, attention_dropout=0.1, position_embedding_type="alibi", embed_layernorm=True,
)  # fmt: skip

USUAL: dict[str, Any] = {
    "engine": "megatron", "megatron_deepspeed": True, "transformer_impl": "local",
    "gradient_accumulation_fusion": False, "recompute": "full", "zero": 1, "precision": "fp16-mixed",
    "tp": 2, "pp": 2, "dp": 2, "micro_batch": 1, "global_batch": 16, "seq_len": 32,
}  # fmt: skip

BF16: dict[str, Any] = {"zero": 0, "precision": "bf16-mixed"}
"""BF16_Optimizer."""

BLOOM = (
    "--pp-partition-method 'type:transformer|embedding' --num-layers 70 --hidden-size 14336 "
    "--num-attention-heads 112 --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 2 "
    "--global-batch-size 2048 --embed-layernorm --bf16 --position-embedding-type alibi "
    "--checkpoint-activations --abort-on-unmet-fused-kernel-constraints --pad-vocab-size-to 250880 "
    "--clip-grad 1.0 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 12 --deepspeed "
    "--deepspeed_config ds_config.json --zero-stage 0 --deepspeed-activation-checkpointing"
)
"""tr11-176B-ml.slurm, without data, learning rate and ramp-up."""


def small(**options: Any) -> Any:
    asked = USUAL | options
    ranks = asked["tp"] * asked["pp"] * asked["dp"]
    return memplan.estimate(SMALL, cluster=f"{ranks}xa100-80-sxm", gpus_per_node=2, **asked)


@pytest.fixture(scope="module")
def rows() -> list[bigscience.Scored]:
    """Every third row of ZeRO-1, and two of BF16_Optimizer, which take longer."""
    every = bigscience.read_rows()
    assert len(every) == 137
    of_zero_1 = [row for row in every if row["zero_stage"] == "1"]
    of_bf16 = [row for row in every if row["row_id"][-4:] in ("1216", "1222")]
    return [bigscience.scored(row) for row in (*of_zero_1[2::3], *of_bf16)]


def test_what_nvidia_smi_showed_of_the_first_stage_is_met(rows):
    errors = [abs(row.error) for row in rows if row.error is not None and not row.reason]
    outside = [abs(row.outside) for row in rows if row.outside is not None and not row.reason]
    assert len(errors) >= 20
    assert median(errors) <= 0.045
    assert sum(not off for off in outside) >= 0.8 * len(outside)


def test_no_verdict_on_zero_1_contradicts_a_run(rows):
    assert not [row.row["row_id"] for row in rows if row.contradicted]


def test_published_seconds_are_met_in_their_order(rows):
    those = [row for row in rows if row.row["step_s"] and not row.reason]
    timed = [(row.predicted_s or 0, float(row.row["step_s"])) for row in those]
    assert median(abs(found / published - 1) for found, published in timed) <= 0.15
    assert rank_correlation(timed) >= 0.8


@pytest.mark.parametrize("dp", [2, 3])
@pytest.mark.parametrize("options", [{}, {"precision": "bf16-mixed"}, BF16], ids=str)
def test_states_are_flat_weights_and_a_partition(options, dp):
    asked = options | {"dp": dp, "global_batch": 8 * dp}
    for stage in small(**asked).stages:
        weights = [buffer for buffer in stage.record.rest if buffer.kind == "weights"]
        padded = sum(buffer.n_bytes for buffer in weights) // 2
        states = sum(buffer.n_bytes for buffer in stage.record.rest if buffer.kind == "optimizer")
        grads = sum(n * buffer.n_bytes for buffer, n in stage.record.rest.items() if buffer.kind == "grads")
        assert len(weights) == 3
        assert states == padded // dp * 12
        if options != BF16:
            assert grads == 0
        else:
            assert 6 * (padded - 3 * 2 * dp) <= grads <= 6 * padded


def test_weights_that_decay_are_two_groups_and_the_embeddings_come_first():
    names = "layer.a", "layer.b", "embedding.word_embeddings.weight", "embedding.word_embeddings.norm.weight"
    weights = [Parameter(name, (4,) if "norm" in name else (4, 4), FP16) for name in names]
    biases = [Parameter("layer.bias", (4,), FP16)]
    groups = parameter_groups([*weights, *biases])
    assert [[p.name for p in group] for group in groups] == [
        ["embedding.word_embeddings.weight", "embedding.word_embeddings.norm.weight"],
        ["layer.a", "layer.b"],
        ["layer.bias"],
    ]


@pytest.mark.parametrize(
    "options",
    [
        {},
        BF16,
        {"tp": 1},
        {"pp": 1},
        {"pp": 4, "dp": 1},
        {"global_batch": 2},
        BF16 | {"tp": 1, "dp": 3, "global_batch": 24},
    ],
    ids=str,
)
def test_laws_hold(options):
    check_laws(small(**options))


def test_a_stage_keeps_an_input_for_each_micro_batch_in_flight():
    of_first = [small(pp=pp, dp=1, micro_batch=16, global_batch=256).stages[0] for pp in (2, 4)]
    kept = [
        sum(n for buffer, n in stage.alive.items() if buffer.name == "part of the output")
        for stage in of_first
    ]
    assert kept == [2, 4]


def test_bigsciences_own_arguments_are_read():
    found = read(BLOOM, "megatron")
    assert "deepspeed_config is not read" in " ".join(found.notes)
    model, plan = found.keywords["model"], found.keywords
    assert (model.position_embedding_type, model.embed_layernorm, model.vocab_size) == (
        "alibi",
        True,
        250_880,
    )
    assert plan["layers_per_stage"] == (5, *[6] * 10, 5)
    assert (plan["zero"], plan["precision"], plan["recompute"]) == (0, "bf16-mixed", "full")
    assert plan["megatron_deepspeed"]


@pytest.mark.parametrize("n_layers, stages", [(78, (7,) * 11 + (1,)), (72, (6,) * 12), (9, None)], ids=str)
def test_deepspeed_deals_layers_out_from_the_front(n_layers, stages):
    line = BLOOM.replace("type:transformer|embedding", "type:transformer")
    line = line.replace("--num-layers 70", f"--num-layers {n_layers}")
    if stages is None:
        with pytest.raises(PlanRefused, match="a stage without one"):
            read(line, "megatron")
    else:
        assert read(line, "megatron").keywords["layers_per_stage"] == stages


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"zero": 0}, "zero=0 in 'fp16-mixed'"),
    ({"precision": "fp32"}, "zero=1 in 'fp32'"),
    ({"recompute": "none"}, "layers that are kept"),
    ({"recompute_blocks": 1}, "layers that are kept"),
    ({"transformer_impl": "transformer_engine"}, "transformer_engine"),
    ({"gradient_accumulation_fusion": True}, "gradient_accumulation_fusion=True"),
    ({"overlap_grad_reduce": True}, "overlap_grad_reduce=True"),
    ({"sequence_parallel": True}, "sequence_parallel=True"),
    ({"virtual_stages": 2, "schedule": "interleaved-1f1b"}, "virtual_stages=2"),
    ({"pp": 3}, "4 layers on 3 stages"),
    ({"tp": 8}, "1 rows of 32 scores"),
    ({"megatron_deepspeed": False}, "alibi and embed_layernorm"),
]


@pytest.mark.parametrize("options, said", REFUSED, ids=[said for _, said in REFUSED])
def test_what_has_no_rule_is_refused_by_name(options, said):
    with pytest.raises(MissingRule, match=said):
        small(**options)


def test_arguments_of_megatron_deepspeed_need_it():
    with pytest.raises(MissingRule, match="--zero-stage is an argument of Megatron-DeepSpeed"):
        read(BLOOM.replace("--deepspeed ", ""), "megatron")


@pytest.mark.parametrize(
    "more, said",
    [
        ("--partition-activations", "partition-activations"),
        ("--checkpoint-num-layers 2", "checkpoint-num-layers"),
    ],
)
def test_arguments_without_a_rule_are_refused_by_name(more, said):
    with pytest.raises(MissingRule, match=said):
        read(f"{BLOOM} {more}", "megatron")


@pytest.mark.parametrize("options", [{}, BF16], ids=str)
def test_a_searchs_bound_is_no_more_than_a_rank_holds(options):
    asked = USUAL | options | {"dp": 4, "global_batch": 32}
    stage = small(**asked).stages[0]
    weights = sum(buffer.n_bytes for buffer in stage.record.rest if buffer.kind == "weights")
    bound = data_parallelism(plan_of(**asked), weights // 2).states_bytes
    assert bound <= stage.peak_bytes
