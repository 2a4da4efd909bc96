"""What operations refuse: shapes that differ, dims that do not divide, heads that no kernel here is for."""

import pytest

from memplan.device import A100, CPU, H100
from memplan.errors import InvalidValue
from memplan.ops import (
    add_positions,
    attention,
    cross_entropy,
    dropout,
    embedding,
    gather_sequence,
    heads,
    layer_norm,
    linear,
    merged_heads,
    position_ids,
    repeated_heads,
    rms_norm,
    rope,
)
from memplan.record import Alloc
from memplan.shapes import BF16, FP32, INT64, DType
from memplan.tape import OpContext, Tape, Tensor


def a_tape(**context) -> Tape:
    return Tape(OpContext(**{"device": H100, **context}))


def a_tensor(tape: Tape, *shape: int, dtype: DType = FP32) -> Tensor:
    return tape.new("x", shape, dtype, tape.node((None,), (), lambda grad, saved: (None,)))


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
    whole = gather_sequence(a_tensor(tape, 1, 2, 6))
    assert whole.shape == (1, 8, 6)
    assert linear(whole, "wo", 6, bias=False, split="rows").shape == (1, 2, 6)


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
