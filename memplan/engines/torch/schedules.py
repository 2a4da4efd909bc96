"""The order of forward and backward passes in a step."""

from collections.abc import Sequence
from itertools import pairwise

from memplan.engines.torch.passes import Passes
from memplan.engines.torch.runtime import run_actions
from memplan.engines.torch.stage import RankStages
from memplan.plan import SINGLE_STAGE_SCHEDULES
from memplan.record import Stretch, chain, passed, repeated
from memplan.tape import HOLD_WHAT_IS_SENT


def schedule(stages: RankStages, passes: Sequence[Passes]) -> list[Stretch]:
    """The order of forward and backward passes in a step, given those of each of the rank's stages."""
    plan, m = stages.plan, stages.plan.n_micro_batches
    if plan.pp == 1:
        return _accumulation(passes[0], m)
    if plan.schedule not in SINGLE_STAGE_SCHEDULES:
        return run_actions(stages, passes)
    only, stage = passes[0], passes[0].stage
    keeps_sent = plan.schedule == "gpipe" and stages.backend in HOLD_WHAT_IS_SENT
    if plan.schedule == "gpipe":
        parts = _gpipe(only, m, keeps_sent=keeps_sent)
    else:
        parts = _one_forward_one_backward(only, m, min(m, plan.pp - stages.rank.pp))
    outputs = m if keeps_sent and not stage.last else 1
    input_grads = 0 if stage.first else m if keeps_sent else 1
    return [
        *parts,
        *only.reduced(),
        repeated(only.release(), outputs),
        repeated(only.release_input_grad(), input_grads),
        repeated(only.release_loss(), m if stage.last else 0),
    ]


def _accumulation(passes: Passes, m: int) -> list[Stretch]:
    def one(*, first: bool, last: bool) -> Stretch:
        return chain(
            "micro-batch",
            _forward(passes, passes.forward(first=first)),
            _backward(passes, passes.backward(first=first, last=last)),
        )

    n_last = int(passes.reduces and m > 1)
    later = [
        repeated(one(first=False, last=False), m - 1 - n_last),
        repeated(one(first=False, last=True), n_last),
    ]
    return [one(first=True, last=m == 1), *later]


def _gpipe(passes: Passes, m: int, *, keeps_sent: bool) -> list[Stretch]:
    """All forwards, then all backwards. The last output is held until the schedule ends.

    So are the handles of what was sent, and gloo's keep the tensors. Else the gradient that was sent is
    dropped when the next micro-batch's operations take the place of its own (`ops`), before that goes back.

    Source: torch/distributed/pipelining/schedules.py (`ScheduleGPipe._step_microbatches`).
    """
    stage = passes.stage
    done = [] if keeps_sent and not stage.last else [passes.release()]
    sent = [] if keeps_sent or stage.first else [passes.release_input_grad()]
    first, later = passes.backward(first=True, last=m == 1), passes.backward(first=False, unsharded=True)
    last = passes.backward(first=False, last=True, unsharded=True)
    steps = [
        _forward(passes, passes.forward(first=True)),
        repeated(_forward(passes, passes.forward(first=False)), m - 1),
    ]
    if m == 1:
        return [*steps, _backward(passes, first)]
    steps += [
        _backward(passes, first, *done),
        repeated(_backward(passes, *sent, later, *done), m - 2),
    ]
    return [*steps, _backward(passes, *sent, last)]


def _one_forward_one_backward(passes: Passes, m: int, warm_up: int) -> list[Stretch]:
    """Warm-up forwards, then a backward and a forward in turn, then the backwards left.

    The last stage's logits are held by the schedule until the next micro-batch's replace them, or it ends;
    the other stages' last output is held to its end too, beyond FSDP2's reductions. Of those stages' outputs
    the one that is sent on its own during warm-up is held by that send's handle (gloo's) until the schedule
    has no forward left and reuses the handle's name.

    Source: torch/distributed/pipelining/schedules.py (`Schedule1F1B._step_microbatches`).
    """
    stage = passes.stage
    last_turn = m - warm_up
    sent_alone = warm_up - 2
    holds = stage.backend in HOLD_WHAT_IS_SENT and not stage.last and 0 <= sent_alone < last_turn
    release = passes.release()
    warm = _forward(passes, passes.forward(first=False))
    forward = _forward(passes, passes.forward(first=False, unsharded=True, releases=stage.last))
    sent = [] if stage.first else [passes.release_input_grad()]

    def done(i: int) -> list[Stretch]:
        if stage.last or i == m - 1 or (holds and i == sent_alone):
            return []
        return [release, release] if holds and i == last_turn else [release]

    def turn(i: int) -> Stretch:
        if i == 0:
            return _backward(passes, passes.backward(first=True, last=m == 1), *done(i))
        if i <= last_turn:
            turned = passes.backward(first=False, last=i == m - 1)
            backward = _backward(passes, turned, *sent, *done(i))
            return chain("forward and backward", forward, backward)
        drained = passes.backward(first=False, last=i == m - 1, unsharded=True)
        return _backward(passes, drained, *sent, *done(i))

    steps = [_forward(passes, passes.forward(first=True)), repeated(warm, warm_up - 1)]
    cuts = {0, 1, last_turn, last_turn + 1, m - 1, m} | ({sent_alone, sent_alone + 1} if holds else set())
    steps += [repeated(turn(a), b - a) for a, b in pairwise(sorted(cuts)) if b <= m]
    return steps


def _forward(passes: Passes, *parts: Stretch) -> Stretch:
    """A micro-batch's forward pass, with what is received before it and sent after it."""
    received = [] if passes.stage.first else [passes.fwd_recv]
    sent = [] if passes.stage.last else [passes.fwd_send]
    return passed(0, "forward", *received, *parts, *sent)


def _backward(passes: Passes, *parts: Stretch) -> Stretch:
    """A micro-batch's backward pass, with what is received before it and sent after it."""
    received = [] if passes.stage.last else [passes.bwd_recv]
    sent = [] if passes.stage.first else [passes.bwd_send]
    return passed(0, "backward", *received, *parts, *sent)
