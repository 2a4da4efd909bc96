"""Abstract autograd on operations made up here: what is allocated and freed, in which order."""

import pytest

from memplan.device import A100, CPU, CPU_OF_SHAPES, H100, Device
from memplan.errors import MissingRule
from memplan.ops import attention, embedding, heads, linear, merged_heads
from memplan.placements import Shard
from memplan.record import AccumulateGrad, AddToIncoming, Alloc, Free, changes
from memplan.shapes import BF16, FP32, INT64, DType
from memplan.tape import CPU_RNG_STATE_BYTES, OpContext, Tape, Tensor


def a_tape(**context) -> Tape:
    return Tape(OpContext(**{"device": H100, **context}))


def input_of(tape: Tape, name: str = "x", dtype: DType = FP32) -> Tensor:
    """A tensor that wants a gradient, as another stage's output does."""
    return tape.new(name, (4,), dtype, tape.node((None,), (), lambda grad, saved: (None,)))


def op(x: Tensor, name: str, *saved: Tensor, view_grad: bool = False) -> Tensor:
    """One output like x, one new gradient for it; saves what it is told to."""

    def backward(grad: Tensor, saved: tuple[Tensor, ...]) -> tuple[Tensor]:
        grad_x = grad.tape.new(f"d({name})/dx", grad.shape, grad.dtype)
        grad_x.is_view = view_grad
        return (grad_x,)

    node = x.tape.node((x.node,), saved, backward)
    return x.tape.new(name, x.shape, x.dtype, node)


def record(tape: Tape, start: int = 0) -> list[str]:
    """Allocations and frees as +name and -name."""
    return [f"{'+' if e.sign > 0 else '-'}{e.buffer.name}" for e in changes(tape.events[start:])]


def alive(tape: Tape) -> dict[str, str]:
    """The kind of each buffer that is not freed, by name."""
    held = {id(e.buffer): e.buffer for e in changes(tape.events) if isinstance(e, Alloc)}
    for event in tape.events:
        if isinstance(event, Free):
            del held[id(event.buffer)]
    return {buffer.name: buffer.kind for buffer in held.values()}


def gradients(tape: Tape) -> list[AccumulateGrad]:
    return [event for event in tape.events if isinstance(event, AccumulateGrad)]


# Lifetimes


def test_a_tensor_dies_with_its_last_name():
    tape = a_tape()
    x = input_of(tape)
    y = op(x, "y")
    del x
    assert record(tape) == ["+x", "+y", "-x"]
    del y
    assert record(tape)[3:] == ["-y"]


def test_a_view_keeps_the_bytes():
    tape = a_tape()
    x = input_of(tape)
    seen = x.view(2, 2)
    assert seen.shape == (2, 2)
    del x
    assert record(tape) == ["+x"]
    del seen
    assert record(tape) == ["+x", "-x"]


def test_what_is_saved_lives_until_its_backward_has_run():
    tape = a_tape()
    x = input_of(tape)
    y = op(x, "y", x)
    del x
    assert alive(tape) == {"x": "activations", "y": "temporaries"}
    start = len(tape.events)
    tape.start_backward(y, tape.new("dy", (4,), FP32))
    del y
    tape.backward(down_to=1)
    assert record(tape, start) == ["+dy", "-y", "+d(y)/dx", "-x", "-dy"]


def test_a_tensor_saved_by_three_is_saved_once():
    tape = a_tape()
    x = input_of(tape)
    users = [op(x, name, x) for name in ("a", "b", "c")]
    del x
    for y in users:
        tape.start_backward(y, tape.new("dy", (4,), FP32))
    del y
    assert record(tape).count("+x") == 1
    tape.backward(down_to=2)
    assert "-x" not in record(tape)
    tape.backward(down_to=1)
    assert "-x" in record(tape)


def test_backward_runs_the_newest_first_and_stops_where_told():
    tape = a_tape()
    z = op(op(op(input_of(tape), "a"), "b"), "c")
    tape.start_backward(z, tape.new("dc", (4,), FP32))
    start = len(tape.events)
    tape.backward(down_to=2)
    assert [name for name in record(tape, start) if name[0] == "+"] == ["+d(c)/dx", "+d(b)/dx"]
    assert len(tape.nodes) == 2


def test_an_output_that_receives_no_gradient_is_a_missing_rule():
    tape = a_tape()
    op(input_of(tape), "y")
    with pytest.raises(MissingRule, match="received no gradient"):
        tape.backward()


# Gradients that meet


def two_users(*, view_grad: bool) -> list[str]:
    """x feeds a and b; what happens in backward until x has its whole gradient."""
    tape = a_tape()
    x = input_of(tape)
    a, b = op(x, "a", view_grad=view_grad), op(x, "b", view_grad=view_grad)
    del x
    tape.start_backward(a, tape.new("da", (4,), FP32))
    tape.start_backward(b, tape.new("db", (4,), FP32))
    del a, b
    start = len(tape.events)
    tape.backward(down_to=1)
    return record(tape, start)


def test_gradients_are_summed_in_place():
    assert two_users(view_grad=False) == ["+d(b)/dx", "-db", "+d(a)/dx", "-da", "-d(a)/dx"]


def test_a_gradient_that_is_a_view_is_summed_out_of_place():
    after = two_users(view_grad=True)
    assert after[:4] == ["+d(b)/dx", "-db", "+d(a)/dx", "-da"]
    assert after[4] == "+sum of grads"
    assert sorted(after[5:]) == ["-d(a)/dx", "-d(b)/dx"]


def test_a_sum_passes_its_gradient_to_both_without_a_copy():
    tape = a_tape()
    x, y = input_of(tape, "x"), input_of(tape, "y")
    z = x + y
    del x, y
    tape.start_backward(z, tape.new("dz", (4,), FP32))
    start = len(tape.events)
    tape.backward(down_to=2)
    assert record(tape, start) == []
    assert [node.grad.storage.buffer.name for node in tape.nodes] == ["dz", "dz"]


@pytest.mark.parametrize(
    "device, copied",
    [
        (CPU, ["+copy as float32", "+residual", "-copy as float32"]),
        *[(d, ["+residual"]) for d in (A100, CPU_OF_SHAPES)],
    ],
)
def test_a_sum_is_in_the_wider_type_and_only_cpus_kernels_copy_what_is_narrow(device, copied):
    tape = a_tape(device=device)
    narrow, x = input_of(tape, "narrow", BF16), input_of(tape)
    z = narrow + x
    assert (z.dtype, z.n_bytes) == (FP32, 16)
    assert record(tape) == ["+narrow", "+x", *copied]
    tape.start_backward(z, tape.new("dz", (4,), FP32))
    start = len(tape.events)
    tape.backward(down_to=2)
    assert record(tape, start) == ["+grad as bfloat16"]


def test_a_workspace_ends_with_its_block_the_newest_first():
    tape = a_tape()
    with tape.workspace() as temporary:
        temporary.new("a", (4,), FP32)
        temporary.keep(tape.new("b", (4,), FP32))
        tape.new("c", (4,), FP32)
    assert record(tape) == ["+a", "+b", "+c", "-c", "-b", "-a"]


def test_a_workspace_that_is_handed_over_outlives_its_block():
    tape = a_tape()
    with tape.workspace() as temporary:
        temporary.new("a", (4,), FP32)
        held = temporary.handed_over()
    assert record(tape) == ["+a"]
    del held
    assert record(tape) == ["+a", "-a"]


@pytest.mark.parametrize("device, made", [(CPU, ["+a", "-a"]), (CPU_OF_SHAPES, [])])
def test_a_kernels_workspace_is_there_where_kernels_run(device, made):
    tape = a_tape(device=device)
    with tape.kernel_workspace() as kernel:
        kernel.new("a", (4,), FP32)
    assert record(tape) == made


@pytest.mark.parametrize("anew, freed", [(False, []), (True, ["-copy as bfloat16"])])
def test_autocast_keeps_copies_of_weights_unless_ddp_makes_them_anew(anew, freed):
    tape = a_tape(tp=2, remakes_dtensors=anew)
    weight = tape.parameter("weight", (8,), placements={"tp": Shard(0)})
    tape.weight(weight, BF16)
    assert record(tape) == ["+copy as bfloat16", *freed]


def test_a_product_saves_both_factors():
    tape = a_tape()
    z = input_of(tape, "x") * input_of(tape, "y")
    assert alive(tape) == {"x": "activations", "y": "activations", "product": "temporaries"}
    assert z.shape == (4,)


def test_a_gradient_from_outside_is_added_to_in_place_but_marked():
    # The caller owns the output's gradient (it has no bytes of its own here); the residual's is added to it.
    tape = a_tape()
    x = input_of(tape)
    y = x + op(x, "a")
    tape.start_backward(y, Tensor(tape, (4,), FP32))
    del x, y
    tape.backward(down_to=1)
    (added,) = [event for event in tape.events if isinstance(event, AddToIncoming)]
    assert added.buffer.name == "sum of grads"
    assert not gradients(tape)


# Recomputation


def a_block(x: Tensor) -> Tensor:
    """a, b, c, d; the last tensor saved is b."""
    a = op(x, "a")
    b = op(a, "b", a)
    c = op(b, "c", b)
    return op(c, "d")


def recomputed(device: Device) -> tuple[Tape, int]:
    """A tape whose block has been recomputed, and where its backward pass began."""
    tape = a_tape(device=device)
    x = input_of(tape)
    y = tape.recomputed(a_block, x)
    del x
    tape.start_backward(y, tape.new("dd", (4,), FP32))
    del y
    start = len(tape.events)
    tape.backward(down_to=1)
    return tape, start


def test_a_recomputed_block_keeps_its_input_only():
    tape = a_tape()
    x = input_of(tape)
    y = tape.recomputed(a_block, x)
    del x
    assert alive(tape) == {"x": "activations", "d": "temporaries"}
    assert y.shape == (4,)


def test_recomputation_stops_once_the_last_saved_tensor_is_there():
    tape, start = recomputed(H100)
    after = record(tape, start)
    first = after.index("+a")
    assert after[:first] == ["+d(d)/dx", "-dd"]  # the last operation saved nothing: its backward runs first
    assert after[first : first + 2] == ["+a", "+b"]
    assert not {"+c", "+d"} & set(after)
    assert sorted(line for line in after if line in ("-a", "-b", "-x")) == ["-a", "-b", "-x"]


def test_what_is_recomputed_is_saved_until_its_own_backward():
    tape, start = recomputed(H100)
    after = record(tape, start)
    assert after.index("+d(c)/dx") < after.index("-b") < after.index("+d(b)/dx") < after.index("-a")


def test_everything_recomputed_is_freed_in_the_end():
    tape, _ = recomputed(H100)
    assert list(alive(tape)) == ["d(a)/dx"]  # what goes back to the block before


@pytest.mark.parametrize("device, states", [(CPU, 2), (H100, 0)])
def test_on_cpu_the_generators_state_is_kept_and_saved_again_beside_it(device, states):
    tape, _ = recomputed(device)
    kept = [e.buffer for e in tape.events if isinstance(e, Alloc) and e.buffer.name == "random state"]
    assert [buffer.n_bytes for buffer in kept] == [CPU_RNG_STATE_BYTES] * states
    assert "random state" not in alive(tape)


def test_recomputation_counts_flops_and_nodes_of_the_forward_pass_once():
    tape = a_tape()
    n_nodes = len((a_block(input_of(tape)), tape.nodes)[1])
    again = a_tape()
    again.recomputed(a_block, input_of(again))
    assert len(again.nodes) == n_nodes


def a_block_with_a_kernel(x: Tensor) -> Tensor:
    """a, k, b, l: k and l by kernels whose outputs can be kept, k's with a workspace; the last saved is b."""

    def kernel() -> tuple[Tensor]:
        tape.new("workspace", (4,), FP32)
        return (tape.new("k", (4,), FP32),)

    tape = x.tape
    a = op(x, "a")
    node = tape.node((a.node,), (a,), lambda grad, saved: (grad,))
    (k,) = tape.save_if_selective(kernel)
    k.node = node
    b = op(k, "b")
    node = tape.node((b.node,), (b,), lambda grad, saved: (grad,))
    (last,) = tape.save_if_selective(lambda: (tape.new("l", (4,), FP32),))
    last.node = node
    return op(last, "out")


def selectively_recomputed() -> tuple[Tape, int]:
    tape = a_tape()
    x = input_of(tape)
    y = tape.recomputed(a_block_with_a_kernel, x, selective=True)
    del x
    assert alive(tape) == {"x": "activations", "k": "activations", "l": "activations", "out": "temporaries"}
    tape.start_backward(y, tape.new("dd", (4,), FP32))
    del y
    start = len(tape.events)
    tape.backward(down_to=1)
    return tape, start


def test_selective_recomputation_runs_no_kernel_again():
    tape, start = selectively_recomputed()
    assert [line for line in record(tape, start) if line[0] == "+" and "/" not in line] == ["+a", "+b"]


def test_what_is_kept_dies_when_it_is_handed_out_or_with_its_region():
    tape, start = selectively_recomputed()
    after = record(tape, start)
    assert after.index("+b") < after.index("-k") < after.index("-a") < after.index("-l")
    assert list(alive(tape)) == ["d(a)/dx"]


# Attention's heads


def attention_pass(dropout: float, **context) -> Tape:
    """Queries, keys and values by linears, attention, merged heads; forward and backward on CPU."""
    tape = a_tape(device=CPU, **context)
    x = tape.new("x", (2, 4, 6), FP32, tape.node((None,), (), lambda grad, saved: (None,)))
    q, k, v = (heads(linear(x, name, 6, bias=False, split="columns"), 3) for name in "qkv")
    y = merged_heads(attention(q, k, v, dropout=dropout))
    tape.start_backward(y, tape.new("dy", y.shape, FP32))
    tape.backward()
    return tape


def test_fused_attention_copies_no_heads():
    assert not {"+by token", "+by head"} & set(record(attention_pass(dropout=0.0)))


def test_attention_by_products_lays_heads_out_and_each_projections_gradient_back_before_it():
    after = record(attention_pass(dropout=0.1))
    after = after[after.index("+dy") :]
    grads = [line for line in after if line in ("+by token", "+q.weight.grad", "+v.weight.grad")]
    assert grads == ["+by token", "+v.weight.grad", "+by token", "+by token", "+q.weight.grad"]


def test_a_selectively_recomputed_score_is_not_added_to_in_place():
    def block(x: Tensor) -> Tensor:
        q, k, v = (heads(linear(x, name, 6, bias=False, split="columns"), 3) for name in "qkv")
        return merged_heads(attention(q, k, v, dropout=0.1))

    for selective in (False, True):
        tape = a_tape(device=CPU)
        tape.recomputed(block, tape.new("x", (2, 4, 6), FP32, tape.node((None,), (), lambda g, s: (None,))),
                       selective=selective)  # fmt: skip
        assert ("+scores and bias" in record(tape)) == selective


# Weights


def test_a_weight_is_made_once_per_name_in_its_scope():
    tape = a_tape()
    with tape.named("blocks.*"):
        inner = tape.parameter("w", (2, 3))
    assert tape.parameter("w", (2, 3)) is tape.parameter("w", (2, 3))
    assert inner is not tape.parameter("w", (2, 3))
    assert list(tape.parameters) == ["blocks.*.w", "w"]


def test_a_weights_bytes_are_the_engines():
    tape = a_tape()
    assert tape.weight(tape.parameter("w", (2, 3))).storage is None
    assert tape.events == []


def test_autocast_keeps_one_copy_of_a_weight_until_it_is_left():
    tape = a_tape()
    parameter = tape.parameter("w", (2, 3))
    tape.weight(parameter, BF16)
    tape.weight(parameter, BF16)
    assert record(tape) == ["+copy as bfloat16"]
    tape.leave_autocast()
    assert record(tape) == ["+copy as bfloat16", "-copy as bfloat16"]


def tied_backward() -> Tape:
    """Six tokens looked up in a table that is the head's weight too, and the whole backward pass."""
    tape = a_tape(seq_len=6)
    x = embedding(Tensor(tape, (1, 6), INT64), "table", 10, 4)
    y = linear(x, "table", 10, bias=False, split="columns")
    del x
    tape.start_backward(y, tape.new("dy", y.shape, FP32))
    del y
    tape.backward()
    return tape


def test_a_tied_weight_is_one_parameter_with_one_gradient():
    tape = tied_backward()
    (table,) = tape.parameters.values()
    assert table.shape == (10, 4)
    assert alive(tape) == {"table.weight.grad": "grads"}
    assert [(event.buffer.name, event.parameter) for event in gradients(tape)] == [
        ("table.weight.grad", table)
    ]


def test_an_untied_heads_gradient_is_its_own():
    tape = a_tape(seq_len=6)
    x = embedding(Tensor(tape, (1, 6), INT64), "table", 10, 4)
    y = linear(x, "head", 10, bias=False, split="columns")
    del x
    tape.start_backward(y, tape.new("dy", y.shape, FP32))
    del y
    tape.backward()
    assert alive(tape) == {"table.weight.grad": "grads", "head.weight.grad": "grads"}
    assert [event.parameter.name for event in gradients(tape)] == ["head.weight", "table.weight"]
