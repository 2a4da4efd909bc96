"""The ledger by name: every state tensor of a small Llama under each ZeRO stage, and the logits surprise."""

from typing import Any

import pytest

import memplan
from memplan import Llama
from memplan.shapes import Shape
from memplan.tables import ledger_rows

N_LAYERS, DP = 3, 4
LLAMA = Llama(
    name="hand-made",
    n_layers=N_LAYERS,
    d_model=8,
    n_heads=4,
    n_kv_heads=2,
    d_ff=20,
    vocab_size=52,
    max_seq_len=16,
)
BLOCK: dict[str, Shape] = {
    "blocks.*.attention_norm.weight": (8,),
    "blocks.*.attention.wq.weight": (8, 8),
    "blocks.*.attention.wk.weight": (4, 8),
    "blocks.*.attention.wv.weight": (4, 8),
    "blocks.*.attention.wo.weight": (8, 8),
    "blocks.*.ffn_norm.weight": (8,),
    "blocks.*.feed_forward.w1.weight": (20, 8),
    "blocks.*.feed_forward.w3.weight": (20, 8),
    "blocks.*.feed_forward.w2.weight": (8, 20),
}
ENDS: dict[str, Shape] = {
    "embedding.tokens.weight": (52, 8),
    "head.norm.weight": (8,),
    "head.output.weight": (52, 8),
}
WEIGHTS = {name: (shape, N_LAYERS) for name, shape in BLOCK.items()} | {n: (s, 1) for n, s in ENDS.items()}
"""Each weight's shape, and how many of it there are."""


def ledger(**asked) -> list[dict[str, Any]]:
    estimated = memplan.estimate(LLAMA, dp=DP, seq_len=4, precision="fp32", **asked)
    return ledger_rows(estimated.worst.alive)


def of_kind(rows: list[dict[str, Any]], kind: str) -> dict[str, tuple[Shape, int]]:
    return {row["name"]: (row["shape"], row["count"]) for row in rows if row["kind"] == kind}


def a_quarter(shape: Shape) -> Shape:
    return (shape[0] // DP, *shape[1:])


def adam_state(weights: dict[str, tuple[Shape, int]], *, steps: bool) -> dict[str, tuple[Shape, int]]:
    found: dict[str, tuple[Shape, int]] = {}
    for name, (shape, n) in weights.items():
        found |= {f"{name}.exp_avg": (shape, n), f"{name}.exp_avg_sq": (shape, n)}
        found |= {f"{name}.step": ((), n)} if steps else {}
    return found


SHARDED = {name: (a_quarter(shape), n) for name, (shape, n) in WEIGHTS.items()}


@pytest.mark.parametrize("zero, weights", [(0, WEIGHTS), (1, WEIGHTS), (2, SHARDED), (3, SHARDED)])
def test_weights_are_whole_up_to_zero_1_and_in_rows_from_zero_2(zero, weights):
    assert of_kind(ledger(zero=zero), "weights") == weights


@pytest.mark.parametrize("zero, weights", [(0, WEIGHTS), (2, SHARDED), (3, SHARDED)])
def test_adam_keeps_two_moments_and_where_it_is_fused_a_count_of_each_weight(zero, weights):
    """Else the counts are on the host."""
    assert of_kind(ledger(zero=zero), "optimizer") == adam_state(weights, steps=False)
    fused = ledger(zero=zero, optimizer_impl="fused")
    assert of_kind(fused, "optimizer") == adam_state(weights, steps=True)


def test_zero_1_deals_out_whole_weights_largest_first():
    """Each to the rank that has least: the fullest then has 416 + 160 + 64 + 64 + 32 of 2,904 elements."""
    owned: dict[str, tuple[Shape, int]] = {
        "embedding.tokens.weight": ((52, 8), 1),
        "blocks.*.feed_forward.w1.weight": ((20, 8), 1),
        "blocks.*.attention.wq.weight": ((8, 8), 1),
        "blocks.*.attention.wo.weight": ((8, 8), 1),
        "blocks.*.attention.wv.weight": ((4, 8), 1),
    }
    assert of_kind(ledger(zero=1), "optimizer") == adam_state(owned, steps=False)


@pytest.mark.parametrize("optimizer, kept", [("sgd", ()), ("sgd-momentum", ("momentum",))])
def test_sgd_keeps_its_momentum_or_nothing(optimizer, kept):
    expected = {f"{name}.{what}": of for name, of in WEIGHTS.items() for what in kept}
    assert of_kind(ledger(optimizer=optimizer), "optimizer") == expected


def test_at_the_update_ddp_has_every_gradient_and_its_bucket():
    rows = ledger(zero=0)
    assert of_kind(rows, "grads") == {f"{name}.grad": of for name, of in WEIGHTS.items()}
    buckets = {f"{name} (DDP bucket)": of for name, of in WEIGHTS.items()}
    assert buckets.items() <= of_kind(rows, "temporaries").items()


def test_zero_3_gathers_one_block_at_a_time():
    whole = {name: of for name, of in of_kind(ledger(zero=3), "temporaries").items() if "(unsharded)" in name}
    flat = {f"{name} (unsharded)": of for name, of in WEIGHTS.items()}
    assert {name: n for name, (_, n) in whole.items()} == dict.fromkeys(flat, 1)
    elements = sum(shape[0] for shape, _ in whole.values())
    assert elements == sum(
        rows * (rest[0] if rest else 1) for rows, *rest in [*BLOCK.values(), *ENDS.values()]
    )


def test_one_unit_gathers_all_blocks_at_once():
    rows = of_kind(ledger(zero=3, fsdp_units="model"), "temporaries")
    whole = {name.removesuffix(" (unsharded)"): n for name, (_, n) in rows.items() if "(unsharded)" in name}
    assert whole == {name: n for name, (_, n) in WEIGHTS.items()}


# The logits surprise: a table of 128,256 tokens outweighs everything else in a step.

SEQ_LEN, VOCAB = 8192, 128_256


@pytest.fixture(scope="module")
def two_layers():
    model = Llama(
        name="wide vocabulary",
        n_layers=2,
        d_model=1024,
        n_heads=8,
        n_kv_heads=2,
        d_ff=4096,
        vocab_size=VOCAB,
        max_seq_len=SEQ_LEN,
    )
    return memplan.estimate(model, precision="bf16", optimizer="sgd").worst


@pytest.mark.parametrize(
    "name, kind",
    [
        ("log-probabilities", "activations"),
        ("grad of log-probabilities", "temporaries"),
        ("grad of logits", "temporaries"),
    ],
)
def test_a_large_vocabulary_is_held_three_times_in_float32_even_if_all_is_bf16(two_layers, name, kind):
    found = [row for row in ledger_rows(two_layers.alive) if row["name"] == name]
    assert found == [
        {
            "name": name,
            "kind": kind,
            "shape": (1, SEQ_LEN, VOCAB),
            "dtype": "float32",
            "count": 1,
            "each_bytes": 4 * SEQ_LEN * VOCAB,
            "total_bytes": 4 * SEQ_LEN * VOCAB,
        }
    ]


def test_the_logits_make_the_peak(two_layers):
    assert "loss" in two_layers.when
    assert 0.8 * two_layers.peak_bytes < 3 * 4 * SEQ_LEN * VOCAB
