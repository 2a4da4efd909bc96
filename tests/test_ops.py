"""What operations refuse, in shapes, types and placements; where their outputs are; what is sent for them."""

import pytest

from memplan.device import A100, CPU, H100
from memplan.errors import InvalidValue, MissingRule
from memplan.ops import (
    add_positions,
    attention,
    cross_entropy,
    dropout,
    embedding,
    feature_parts,
    gelu_new,
    heads,
    layer_norm,
    learned_positions,
    linear,
    merged_heads,
    position_ids,
    redistribute,
    repeated_heads,
    rms_norm,
    rope,
    silu,
)
from memplan.placements import WHOLE, Partial, Placements, Replicate, Shard, shown
from memplan.record import Alloc, Collective
from memplan.shapes import BF16, FP32, INT64, DType
from memplan.tape import OpContext, Tape, Tensor

PARTIAL, BY_TOKEN, BY_FEATURE = ({"tp": each} for each in (Partial(), Shard(1), Shard(2)))


def a_tape(**context) -> Tape:
    return Tape(OpContext(**{"device": H100, **context}))


def a_tensor(tape: Tape, *shape: int, dtype: DType = FP32, placements: Placements = WHOLE) -> Tensor:
    x = tape.new("x", shape, dtype, tape.node((None,), (), lambda grad, saved: (None,)))
    x.placements = placements
    return x


def refused(match: str):
    return pytest.raises(InvalidValue, match=match)


@pytest.mark.parametrize("tp, n_out", [(1, 10), (2, 5), (5, 2)])
def test_tensor_ranks_divide_a_weights_columns(tp, n_out):
    y = linear(a_tensor(a_tape(tp=tp), 1, 8, 6), "wq", 10, bias=True, split="columns")
    assert y.shape == (1, 8, n_out)


@pytest.mark.parametrize("tp", [3, 4, 20])
def test_columns_that_do_not_divide_are_refused(tp):
    with refused(rf"tp={tp} does not divide n_out of wq=10; use a multiple of {tp}, or for tp one of 1, 2,"):
        linear(a_tensor(a_tape(tp=tp), 1, 8, 6), "wq", 10, bias=False, split="columns")


def test_rows_of_the_vocabulary_that_do_not_divide_are_refused():
    with refused("tp=4 does not divide n_rows of table=10"):
        embedding(Tensor(a_tape(tp=4), (1, 8), INT64), "table", 10, 4)


@pytest.mark.parametrize("enter", [position_ids, lambda tokens: embedding(tokens, "table", 8, 4)])
def test_a_sequence_that_does_not_divide_is_refused(enter):
    with refused("tp=4 does not divide seq_len=10"):
        enter(Tensor(a_tape(tp=4, sequence_parallel=True), (1, 10), INT64))


@pytest.mark.parametrize("device", [CPU, A100, H100])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_values_with_narrower_heads_than_queries_are_refused(device, dtype):
    tape = a_tape(device=device)
    q, k = (a_tensor(tape, 1, 8, 4, 192, dtype=dtype) for _ in range(2))
    with refused("values with heads of 128 to queries with heads of 192 has no rule"):
        attention(q, k, a_tensor(tape, 1, 8, 4, 128, dtype=dtype))


@pytest.mark.parametrize(
    "k, match",
    [
        ((1, 8, 3, 16), "n_kv_heads=3 does not divide n_heads=4"),
        ((1, 9, 2, 16), r"attention of \(1, 8, 2, 16\) and \(1, 9, 2, 16\)"),
        ((2, 8, 2, 16), r"attention of \(1, 8, 2, 16\) and \(2, 8, 2, 16\)"),
        ((8, 4, 16), r"attention of a tensor of shape \(8, 4, 16\) has no rule; use the shape \(batch, seq"),
    ],
)
def test_keys_that_do_not_fit_their_queries_are_refused(k, match):
    tape = a_tape()
    key, value = a_tensor(tape, *k), a_tensor(tape, *k)
    with refused(match):
        attention(a_tensor(tape, 1, 8, 4, 16), key, value)


def test_keys_of_another_type_than_their_queries_are_refused():
    tape = a_tape()
    k = a_tensor(tape, 1, 8, 4, 16, dtype=BF16)
    with refused("'float32'.* and .*'bfloat16'"):
        attention(a_tensor(tape, 1, 8, 4, 16), k, k)


@pytest.mark.parametrize("shape", [(1, 8, 5), (1, 1, 6), (8, 6), (6,)])
@pytest.mark.parametrize("operation", [Tensor.__mul__, Tensor.__add__])
def test_elementwise_operations_of_different_shapes_are_refused(operation, shape):
    tape = a_tape()
    with refused(r"of \(1, 8, 6\) and .* has no rule"):
        operation(a_tensor(tape, 1, 8, 6), a_tensor(tape, *shape))


def test_a_product_of_different_types_is_refused():
    tape = a_tape()
    with refused("of float32 and bfloat16 has no rule"):
        a_tensor(tape, 4) * a_tensor(tape, 4, dtype=BF16)


def test_a_view_of_another_number_of_elements_is_refused():
    with refused("another number of elements; use a shape of 48"):
        a_tensor(a_tape(), 1, 8, 6).view(8, 5)


def test_positions_of_another_length_are_refused():
    tape = a_tape()
    with refused(r"positions of \(8, 6\) and \(9, 6\)"):
        add_positions(a_tensor(tape, 2, 8, 6), a_tensor(tape, 9, 6))


def test_a_tied_weight_of_another_shape_is_refused():
    tape = a_tape()
    x = embedding(Tensor(tape, (1, 8), INT64), "table", 10, 4)
    with refused(r"two uses of table.weight of \(10, 4\) and \(12, 4\)"):
        linear(x, "table", 12, bias=False, split="columns")


def test_heads_that_do_not_divide_are_refused():
    tape = a_tape()
    with refused("d_head=4 does not divide heads x d_head=10"):
        heads(a_tensor(tape, 1, 8, 10), 4)
    with refused("n_kv_heads=3 does not divide n_heads=4"):
        repeated_heads(a_tensor(tape, 1, 8, 3, 16), 4)
    with refused("does not divide d_head=15"):
        rope(a_tensor(tape, 1, 8, 4, 15))


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: linear(x, "w", 4, bias=False, split="rows"),
        lambda x: layer_norm(x, "norm"),
        lambda x: rms_norm(x, "norm"),
        lambda x: heads(x, 2),
        merged_heads,
        cross_entropy,
        rope,
    ],
)
def test_a_tensor_of_too_few_dims_is_refused(operation):
    with refused(r"of a tensor of shape \(8, 6\) has no rule; use the shape \(batch, seq"):
        operation(a_tensor(a_tape(), 8, 6))


@pytest.mark.parametrize("p", [1.0, -0.1, float("nan")])
def test_a_dropout_that_is_no_probability_is_refused(p):
    with refused("dropout="):
        dropout(a_tensor(a_tape(), 1, 8, 6), p)


def test_a_whole_sequence_is_gathered_and_divided_again():
    tape = a_tape(tp=4, sequence_parallel=True)
    whole = redistribute(a_tensor(tape, 1, 2, 6, placements=BY_TOKEN), "tp", Replicate())
    assert (whole.shape, whole.placements) == ((1, 8, 6), WHOLE)
    part = linear(whole, "w1", 12, bias=False, split="columns")
    assert (part.shape, part.placements) == ((1, 8, 3), BY_FEATURE)
    y = linear(part, "w2", 6, bias=False, split="rows")
    assert (y.shape, y.placements) == ((1, 2, 6), BY_TOKEN)


# Placements

FEATURES, HEADS = (1, 8, 8), (1, 8, 4, 16)


def by_columns(x: Tensor) -> Tensor:
    return linear(x, "wq", 8, bias=True, split="columns")


def by_rows(x: Tensor) -> Tensor:
    return linear(x, "wo", 8, bias=True, split="rows")


def attended(q: Tensor) -> Tensor:
    return attention(q, *(a_tensor(q.tape, *q.shape, placements=q.placements) for _ in "kv"))


def normed(x: Tensor) -> Tensor:
    return rms_norm(x, "norm")


def dropped(x: Tensor) -> Tensor:
    return dropout(x, 0.1)


def squared(x: Tensor) -> Tensor:
    return x * x


def doubled(x: Tensor) -> Tensor:
    return x + x


@pytest.mark.parametrize(
    "operation, shape, own, after",
    [
        (by_columns, FEATURES, WHOLE, BY_FEATURE),
        (by_rows, FEATURES, BY_FEATURE, WHOLE),
        (lambda x: heads(x, 2), FEATURES, BY_FEATURE, BY_FEATURE),
        (lambda x: x.view(1, 8, 2, 4), FEATURES, BY_FEATURE, BY_FEATURE),
        (merged_heads, HEADS, BY_FEATURE, BY_FEATURE),
        (rope, HEADS, BY_FEATURE, BY_FEATURE),
        (lambda x: repeated_heads(x, 8), HEADS, BY_FEATURE, BY_FEATURE),
        (attended, HEADS, WHOLE, WHOLE),
        (attended, HEADS, BY_FEATURE, BY_FEATURE),
        (cross_entropy, FEATURES, WHOLE, WHOLE),
        (cross_entropy, FEATURES, BY_FEATURE, WHOLE),
        (doubled, FEATURES, PARTIAL, PARTIAL),
        *[(each, FEATURES, own, own) for each in (normed, silu, dropped) for own in (WHOLE, BY_TOKEN)],
        *[(each, FEATURES, BY_FEATURE, BY_FEATURE) for each in (silu, gelu_new, squared, doubled)],
    ],
)
@pytest.mark.parametrize("device", [CPU, H100])
@pytest.mark.parametrize("autocast", [None, BF16])
def test_an_outputs_placements_follow_from_its_inputs(autocast, device, operation, shape, own, after):
    tape = a_tape(tp=2, device=device, autocast=autocast)
    assert operation(a_tensor(tape, *shape, placements=own)).placements == after
    assert operation(a_tensor(a_tape(device=device, autocast=autocast), *shape)).placements == WHOLE


@pytest.mark.parametrize(
    "operation, name, shape, own, rule",
    [
        *[
            (by_rows, "linear wo by rows", FEATURES, own, BY_FEATURE)
            for own in (WHOLE, PARTIAL, BY_TOKEN)
        ],
        *[
            (by_columns, "linear wq by columns", FEATURES, own, WHOLE)
            for own in (PARTIAL, BY_TOKEN, BY_FEATURE)
        ],
        *[
            (each, name, shape, own, BY_FEATURE)
            for each, name, shape in (
                (attended, "attention", HEADS), (rope, "rope", HEADS), (merged_heads, "merged heads", HEADS),
                (lambda x: heads(x, 2), "heads", FEATURES), (cross_entropy, "cross_entropy", FEATURES),
            )
            for own in (PARTIAL, BY_TOKEN)
        ],
        *[
            (each, name, FEATURES, own, BY_TOKEN)
            for each, name in (
                (normed, "rms_norm norm"), (lambda x: layer_norm(x, "norm"), "layer_norm norm"),
            )
            for own in (PARTIAL, BY_FEATURE)
        ],
        *[(each, name, FEATURES, PARTIAL, WHOLE)
          for each, name in ((silu, "silu"), (dropped, "dropout"), (squared, "a product"))],
        (lambda x: a_tensor(x.tape, *FEATURES) + x, "a sum", FEATURES, PARTIAL, WHOLE),
        (lambda x: feature_parts(x, 2), "parts of the features", FEATURES, BY_FEATURE, WHOLE),
        (lambda x: x.view(1, 32, 16), "a view as (1, 32, 16)", HEADS, BY_FEATURE, WHOLE),
    ],
)  # fmt: skip
def test_an_operation_without_a_rule_for_a_placement_names_tensor_and_placement(
    operation, name, shape, own, rule
):
    with pytest.raises(MissingRule) as refusal:
        operation(a_tensor(a_tape(tp=2), *shape, placements=own))
    wanted = [shown(rule)] if rule == WHOLE or operation is by_rows else ["Replicate()", shown(rule)]
    assert str(refusal.value) == (
        f"{name} of x, which is {shown(own)}, has no rule; make it {' or '.join(wanted)}."
    )


def test_positions_are_sharded_as_the_sequence_they_are_added_to():
    tape = a_tape(tp=4, sequence_parallel=True)
    tokens = Tensor(tape, (1, 8), INT64)
    p = learned_positions(position_ids(tokens), "positions", 8, 6)
    assert (p.shape, p.placements) == ((2, 6), {"tp": Shard(0)})
    assert add_positions(embedding(tokens, "tokens", 8, 6), p).placements == BY_TOKEN
    with pytest.raises(MissingRule, match=r"a sum with positions of positions, which is Shard\(dim=0\)"):
        add_positions(a_tensor(tape, 1, 2, 6), p)


@pytest.mark.parametrize(
    "own, sent",
    [
        (WHOLE, ["all_reduce", "all_reduce"]),
        (BY_TOKEN, ["all_gather", "reduce_scatter", "all_gather", "reduce_scatter"]),
    ],
)
def test_a_regions_collectives_follow_from_where_its_input_and_its_gradients_are(own, sent):
    tape = a_tape(tp=4, sequence_parallel=own == BY_TOKEN)
    x = a_tensor(tape, 2, 2 if own else 8, 8, placements=own)
    y = by_rows(silu(by_columns(redistribute(x, "tp", Replicate()))))
    assert y.placements == own
    tape.start_backward(y, tape.new("dy", y.shape, FP32))
    tape.backward(down_to=1)
    made = [event for event in tape.events if isinstance(event, Collective)]
    assert [one.kind for one in made] == sent
    assert {one.axis for one in made} == {"tp"}
    assert {one.payload_bytes for one in made} == {2 * 8 * 8 * FP32.itemsize}
    assert tape.nodes[0].grad.placements == own


def test_axis_and_size_of_a_collective_are_the_meshs():
    tape = a_tape()
    tape.mesh = {"dp": 3, "tp": 2}
    x = a_tensor(tape, 1, 2, 6, placements={"dp": Shard(1), "tp": Shard(2)})
    x = redistribute(x, "dp", Replicate())
    assert (x.shape, x.placements) == ((1, 6, 6), BY_FEATURE)
    (made,) = (event for event in tape.events if isinstance(event, Collective))
    assert (made.kind, made.axis) == ("all_gather", "dp")


@pytest.mark.parametrize("own, target", [(BY_FEATURE, Replicate()), (WHOLE, Shard(1)), (PARTIAL, Shard(2))])
def test_a_redistribution_that_no_rule_needs_is_refused(own, target):
    x = a_tensor(a_tape(tp=2), *FEATURES, placements=own)
    with pytest.raises(MissingRule, match=r"of x over tp from .* has no rule") as refusal:
        redistribute(x, "tp", target)
    assert f"from {own.get('tp', Replicate())} to {target}" in str(refusal.value)


def test_a_weights_gradient_that_nobody_sums_is_refused():
    tape = a_tape(tp=2)
    y = by_columns(normed(a_tensor(tape, *FEATURES)))
    tape.start_backward(y, tape.new("dy", y.shape, FP32))
    with pytest.raises(
        MissingRule, match=r"an addition to norm.weight.grad of grad, which is Partial\(\) over tp"
    ):
        tape.backward(down_to=1)


def test_a_sum_of_a_partial_gradient_and_a_whole_one_is_refused():
    tape = a_tape(tp=2)
    x = a_tensor(tape, *FEATURES)
    y = x + by_rows(by_columns(x))
    tape.start_backward(y, tape.new("dy", y.shape, FP32))
    with pytest.raises(MissingRule, match=r"a sum of gradients of .*, which is Partial\(\) over tp"):
        tape.backward(down_to=1)


# Gradients of operands that were broadcast


@pytest.mark.parametrize("batch", [1, 2])
def test_the_gradient_of_positions_is_summed_over_the_batch_even_of_one(batch):
    tape = a_tape()
    x, p = a_tensor(tape, batch, 8, 6), a_tensor(tape, 8, 6)
    y = add_positions(x, p)
    tape.start_backward(y, tape.new("dy", y.shape, FP32))
    start = len(tape.events)
    tape.backward(down_to=2)
    assert [e.buffer.shape for e in tape.events[start:] if isinstance(e, Alloc)] == [(8, 6)]
    assert [node.grad.shape for node in tape.nodes] == [(batch, 8, 6), (8, 6)]


def test_a_biass_gradient_is_summed_over_the_tokens_after_the_products():
    tape = a_tape()
    y = linear(a_tensor(tape, 2, 8, 6), "w", 10, bias=True, split="columns")
    tape.start_backward(y, tape.new("dy", y.shape, FP32))
    start = len(tape.events)
    tape.backward(down_to=1)
    made = [e.buffer.shape for e in tape.events[start:] if isinstance(e, Alloc)]
    assert made == [(2, 8, 6), (10, 6), (10,)]
