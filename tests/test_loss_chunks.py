"""Cross-entropy over chunks of the sequence: which pieces, what is alive when, that it is the same loss."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memplan import Plan
from memplan.device import CPU
from memplan.errors import PlanRefused
from memplan.ops import cross_entropy, gradient_of_loss
from memplan.placements import Shard
from memplan.record import Alloc, changes
from memplan.shapes import BF16, FP32, DType, Shape
from memplan.tape import OpContext, Tape, Tensor
from validate.systems.torch.modules import token_loss

VOCABULARY = 1000


def logits_of(tape: Tape, shape: Shape, dtype: DType) -> Tensor:
    """Logits that want a gradient, sharded over the vocabulary where there are tensor ranks."""
    logits = tape.new("logits", shape, dtype, tape.node((None,), (), lambda grad, saved: (None,)))
    logits.placements = tape.over("tp", Shard(2))
    return logits


def peaks(chunks: int, *, seq_len: int = 12, batch: int = 1, dtype: DType = BF16, tp: int = 1):
    """The most a loss holds beside its logits, forward and backward, and what it saves between them."""
    tape = Tape(OpContext(device=CPU, loss_chunks=chunks, tp=tp))
    logits = logits_of(tape, (batch, seq_len, VOCABULARY // tp), dtype)
    start = len(tape.events)
    loss = cross_entropy(logits)
    kept, forward = running(tape.events[start:])
    middle = len(tape.events)
    tape.start_backward(loss, gradient_of_loss(tape))
    del loss
    tape.backward(down_to=1)
    _, backward = running(tape.events[middle:])
    return kept, forward, kept + backward


def lost(chunks: int):
    """The events of a loss's backward pass."""
    tape = Tape(OpContext(device=CPU, loss_chunks=chunks))
    logits = logits_of(tape, (1, 12, VOCABULARY), BF16)
    loss = cross_entropy(logits)
    start = len(tape.events)
    tape.start_backward(loss, gradient_of_loss(tape))
    tape.backward(down_to=1)
    return tape.events[start:]


def running(events):
    held = most = 0
    for event in changes(events):
        held += event.sign * event.buffer.n_bytes
        most = max(most, held)
    return held, most


@given(seq_len=st.integers(1, 40), chunks=st.integers(2, 12))
def test_the_pieces_are_torch_chunks(seq_len, chunks):
    tape = Tape(OpContext(loss_chunks=chunks))
    logits = Tensor(tape, (1, seq_len, 7), FP32, None, tape.node((None,), (), lambda g, s: (None,)))
    start = len(tape.events)
    cross_entropy(logits)
    found = [
        e.buffer.shape[1]
        for e in tape.events[start:]
        if isinstance(e, Alloc) and e.buffer.name == "log-probabilities"
    ]
    assert found == [piece.shape[1] for piece in torch.empty(1, seq_len, 7).chunk(chunks, dim=1)]


@pytest.mark.parametrize("tp", [1, 2])
def test_log_probabilities_of_all_pieces_are_saved_but_one_piece_is_widened_at_a_time(tp):
    whole = 12 * VOCABULARY // tp * 4
    kept_at_once, forward_at_once, _ = peaks(1, tp=tp)
    kept, forward, _ = peaks(4, tp=tp)
    assert whole <= kept < kept_at_once * 1.01
    workspace, workspace_at_once = forward - kept, forward_at_once - kept_at_once
    assert workspace == pytest.approx(workspace_at_once / 4, rel=0.01)


def test_backward_starts_with_one_pieces_gradients():
    _, _, backward = peaks(4)
    log_probabilities, a_pieces_gradients = 12 * VOCABULARY * 4, 3 * VOCABULARY * (4 + 4)
    assert backward == pytest.approx(log_probabilities + a_pieces_gradients, rel=0.001)


def test_in_the_end_the_narrow_gradients_of_all_pieces_are_joined():
    names = [e.buffer.name for e in lost(4) if isinstance(e, Alloc)]
    assert names.count("grad as bfloat16") == 4
    assert names[-1] == "grad of logits"


@pytest.mark.parametrize("chunks", [1, 2, 3, 7, 12])
def test_it_is_the_same_loss(chunks):
    torch.manual_seed(0)
    logits, targets = torch.randn(2, 12, 50, requires_grad=True), torch.randint(50, (2, 12))
    (whole_grad,) = torch.autograd.grad(token_loss(logits, targets), logits)
    loss = token_loss(logits, targets, chunks=chunks)
    torch.testing.assert_close(loss, token_loss(logits, targets))
    torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], whole_grad)


def test_more_chunks_than_tokens_are_refused():
    with pytest.raises(PlanRefused, match="loss_chunks=9 is more than the seq_len=8"):
        Plan(loss_chunks=9, seq_len=8)
