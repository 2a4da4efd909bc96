"""The order of forward and backward passes in a step."""

from itertools import pairwise

from memplan.engines.torch.passes import Passes
from memplan.engines.torch.stage import Stage
from memplan.timeline import Stretch, chain, repeated


def schedule(stage: Stage, passes: Passes) -> list[Stretch]:
    """The order of forward and backward passes in a step."""
    m = stage.plan.n_micro_batches
    if stage.plan.pp == 1:
        return _accumulation(passes, m)
    passed = (
        _gpipe(passes, m) if stage.plan.schedule == "gpipe" else _one_forward_one_backward(stage, passes, m)
    )
    last_logits = [passes.release()] if stage.last else []
    return [*passed, *passes.end(), *last_logits]


def _accumulation(passes: Passes, m: int) -> list[Stretch]:
    def one(*, first: bool) -> Stretch:
        return chain("micro-batch", passes.forward(first=first), passes.backward(first=first))

    return [one(first=True), repeated(one(first=False), m - 1)]


def _gpipe(passes: Passes, m: int) -> list[Stretch]:
    """All forwards, then all backwards. The last logits are held until the schedule ends.

    Source: torch/distributed/pipelining/schedules.py (`ScheduleGPipe._step_microbatches`).
    """
    done = () if passes.keeps_sent and not passes.stage.last else (passes.release(),)
    first, later = passes.backward(first=True), passes.backward(first=False, unsharded=True)
    steps = [passes.forward(first=True), repeated(passes.forward(first=False), m - 1)]
    if m == 1:
        return [*steps, first, *(() if passes.stage.last else done)]
    steps += [chain("backward", first, *done), repeated(chain("backward", later, *done), m - 2), later]
    return [*steps, *(() if passes.stage.last else done)]


def _one_forward_one_backward(stage: Stage, passes: Passes, m: int) -> list[Stretch]:
    """Warm-up forwards, then a backward and a forward in turn, then the backwards left.

    The last stage's logits are held by the schedule until the next micro-batch's replace them, or it ends.
    The other stages' last output that is sent on its own during warm-up is held by that send's handle
    (gloo's) until the schedule has no forward left and reuses the handle's name.

    Source: torch/distributed/pipelining/schedules.py (`Schedule1F1B._step_microbatches`).
    """
    warm_up = min(m, stage.plan.pp - stage.rank.pp)
    last_turn = m - warm_up
    sent_alone = warm_up - 2
    holds = stage.device == "cpu" and not stage.last and 0 <= sent_alone < last_turn
    release = passes.release()
    warm = passes.forward(first=False)
    forward = passes.forward(first=False, unsharded=True, releases=stage.last)
    backward = passes.backward(first=False)
    drain = passes.backward(first=False, unsharded=True)

    def done(i: int) -> list[Stretch]:
        if stage.last or (holds and i == sent_alone):
            return []
        return [release, release] if holds and i == last_turn else [release]

    def turn(i: int) -> Stretch:
        if i == 0:
            return chain("backward", passes.backward(first=True), *done(i))
        if i <= last_turn:
            return chain("forward and backward", forward, backward, *done(i))
        return chain("backward", drain, *done(i))

    steps = [passes.forward(first=True), repeated(warm, warm_up - 1)]
    cuts = {0, 1, last_turn, last_turn + 1, m} | ({sent_alone, sent_alone + 1} if holds else set())
    steps += [repeated(turn(a), b - a) for a, b in pairwise(sorted(cuts)) if b <= m]
    return steps
