"""Pipeline schedules from torch 2.15 on: receives take new tensors, outputs are freed after their send.

A micro-batch's input and its output's gradient live from their receive to the end of its backward pass. A
stage's output is freed once it has been sent (the graph keeps an edge in its place), unless DDP needs it for
its reducer or it is the last stage's. The last stage's inputs live as long as the losses, whose graphs refer
to them. Variables of the schedules hold some tensors for longer.

Source: torch 2.15's `_PipelineStageBase.backward_one_chunk`, `_PipelineStageBase.release_fwd_send_outputs`,
`_PipelineStageBase._output_slot_is_releasable` (pipelining/stage.py), `_wait_and_release_fwd_send`,
`ScheduleGPipe._step_microbatches`, `Schedule1F1B._step_microbatches` (pipelining/schedules.py).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import is_
from typing import Any, Final, cast

from memplan.engines.torch.lowering import Step, steps
from memplan.engines.torch.stage import RankStages
from memplan.orders import LAST_PARTS, ActionKind
from memplan.parts.module import (
    StageModule,
    backward_pass,
    forward_pass,
    named_pass,
    played,
    repeat,
    turns,
    with_p2p,
)
from memplan.record import Stretch, chain, repeated

Module = StageModule[Any]

Held = tuple[str, int, int]
"""A tensor of a stage and a micro-batch: its name ("output", ...), the stage, the micro-batch."""


def lets_outputs_go(module: Module) -> bool:
    """Whether a stage's output is freed once it has been sent, not at the end of its backward pass."""
    stage = module.stage
    single = stage.plan.pipeline_schedule.single_stage
    return single and not (stage.keeps_received or stage.last or stage.plan.ddp)


def gpipe(stages: RankStages, module: Module) -> list[Stretch]:
    """All forwards, then all outputs are freed, then all backwards.

    Gloo's handles hold the sent gradients until the end, and the last received tensor until the next receive.
    """
    stage, m = module.stage, stages.plan.n_micro_batches
    keeps = stage.keeps_sent
    early = lets_outputs_go(module)

    def backward(i: int) -> Stretch:
        if i == m - 1:
            module.require_gradient_sync()
        replaced = [module.release_received_grad if keeps else module.release_input_grad] * (i > 0)
        parts = [module.receive_grad, *replaced, module.backward(), *_returned(module)]
        return backward_pass(module, *parts, *[module.release_received_grad] * (not keeps))

    steps = repeat(m, lambda: forward_pass(module, module.receive_input, module.forward()), [module])
    steps.append(repeated(module.release, m if early else 0))
    steps += turns(m, {0, 1, m - 1, m}, backward, module)
    last_grad = [module.release_received_grad] * keeps
    ended = list(_ended(module, m if keeps else 1, m))
    return [*steps, *ended, *last_grad] if stage.first else [*steps, *last_grad, *ended]


def one_forward_one_backward(stages: RankStages, module: Module) -> list[Stretch]:
    """Warm-up forwards, then a backward and a forward in turn, then the backwards left.

    During warm-up an output is freed after the next forward pass, later when the next gradient has been
    received. Handles of receives are held until the next receive, the last ones until the schedule returns.
    """
    m = stages.plan.n_micro_batches
    warm_up = min(m, stages.plan.pp - stages.rank.pp)
    last_turn = m - warm_up
    early = lets_outputs_go(module)

    def warm(i: int) -> Stretch:
        released = [module.release] * (early and i > 0)
        return forward_pass(module, module.receive_input, module.forward(), *released)

    def turn(i: int) -> Stretch:
        ahead = 0 < i <= last_turn
        forward = forward_pass(module, module.receive_input, module.forward()) if ahead else None
        if i == m - 1:
            module.require_gradient_sync()
        freed = [module.release] * (early and i <= last_turn)
        freed += [module.release_received_grad] * (i > last_turn + 1)
        parts = [module.receive_grad, *freed, module.backward(), *_returned(module, is_held=i == m - 1)]
        freed = [module.release_received_grad] * (i <= last_turn) + [module.release_input_grad] * (i > 0)
        backward = backward_pass(module, *parts, *freed)
        return backward if forward is None else chain("forward and backward", forward, backward)

    steps = turns(warm_up, {0, 1, warm_up}, warm, module)
    steps += turns(m, {0, 1, last_turn, last_turn + 1, last_turn + 2, m - 1, m}, turn, module)
    steps += [*_ended(module, 1, m), *[module.release_received_input] * (not module.stage.last)]
    return steps + [module.release_received_grad] * (warm_up > 1)


def _returned(module: Module, *, is_held: bool = False) -> Iterator[Stretch]:
    """The frees as a backward pass returns; `is_held`: a variable of the schedule still holds its input."""
    if not lets_outputs_go(module):
        yield module.release
    if not (is_held or module.stage.last):
        yield module.release_received_input


def _ended(module: Module, input_grads: int, m: int) -> Iterator[Stretch]:
    """FSDP2's reductions, then the frees when the schedule returns."""
    yield from module.reduce_grads()
    yield repeated(module.release_input_grad, input_grads)
    if module.stage.last:
        yield repeated(chain("end of the losses", module.release_loss, module.release_received_input), m)


class Runtime:
    """The actions of one rank's step where it has several stages, or where backward passes are split.

    Holders of a tensor are counted, and it is freed with its last one. Holders are the stage's state of the
    micro-batch, up to the end of its backward pass (a split one's also as `grad` of its input); a stage of
    the same rank that was given the tensor; the handle of a gradient's send, up to the end of the step; the
    losses, unless the first part of a split backward pass has detached them.

    Source: `torch.distributed.pipelining.schedules:_PipelineScheduleRuntime._step_microbatches`, torch 2.15's
    `_PendingSendTracker`, `_add_wait_send` (pipelining/schedules.py).
    """

    def __init__(self, stages: RankStages, modules: Sequence[Module]) -> None:
        self.stages = stages
        self.modules = dict(zip(stages.indices, modules, strict=True))
        self.local = {index: local for local, index in enumerate(stages.indices)}
        self.holders: Counter[Held] = Counter()
        self.sent: list[Held] = []
        self.with_losses: list[Held] = []
        self.made: dict[tuple[object, ...], Stretch] = {}
        self.done: dict[tuple[object, ...], tuple[list[Stretch], object]] = {}

    def step(self) -> list[Stretch]:
        """All actions, then the frees of sent gradients, of the losses and of what their graphs hold.

        A schedule repeats itself: of many micro-batches, turns are played up to the first repetitions.
        """
        plan = self.stages.plan
        m, pp = plan.n_micro_batches, plan.pp
        few = 2 * (plan.virtual_stages + 1) * pp
        found = extrapolated(self._played, few, pp, m // pp - few // pp) if m % pp == 0 else None
        ends = [module.release_loss for module in self.modules.values() if module.stage.last]
        return [*(found or self._played(m)), *[repeated(end, m) for end in ends]]

    def _played(self, m: int) -> list[Stretch]:
        """A step of m micro-batches from its start, but for the frees of the losses."""
        self.holders.clear()
        self.sent, self.with_losses = [], []
        for module in self.modules.values():
            module.state = module.initial
        ordered = steps(self.stages.plan, self.stages.rank.pp, m)
        left = Counter(step.stage for step in ordered if step.kind in LAST_PARTS)
        found: list[Stretch] = []
        for step in ordered:
            left[step.stage] -= step.kind in LAST_PARTS
            if step.kind in LAST_PARTS and not left[step.stage]:
                self.modules[step.stage].require_gradient_sync()
            found += self._act(step)
        for held in (*self.sent, *self.with_losses):
            found += self._dropped(held)
        return found

    def _act(self, step: Step) -> list[Stretch]:
        kind, index, i = step
        module = self.modules[index]
        match kind:
            case "unshard" | "reshard" | "reduce":
                return self._once(kind, index, lambda: played(module, kind))
            case "wait-reduce":
                return []
            case "receive-input":
                self.holders["received input", index, i] += 1
                return [module.receive_input]
            case "receive-gradient":
                self.holders["received gradient", index, i] += 1
                return [module.receive_grad]
        return [self._pass(step)]

    def _pass(self, step: Step) -> Stretch:
        kind, index, i = step
        module, action = self.modules[index], cast(ActionKind, kind)
        after, before = index + 1 in self.modules, index - 1 in self.modules
        parts = [*self._once("wait-unshard", index, module.wait_for_unshard)]
        run = played(module, action)
        parts += with_p2p(module, action, run, next_is_here=after, previous_is_here=before)
        if kind == "forward":
            self.holders["output", index, i] += 1 + after
        else:
            if kind != "backward-weight" and not module.stage.first:
                held = "gradient of the input", index, i
                self.holders[held] += 2 if kind == "backward-input" else 1
                self.sent += [] if before else [held]
            parts += self._let_go(step)
        key = kind, index, tuple(parts)
        if key not in self.made:
            self.made[key] = named_pass(module, self.local[index], action, parts)
        return self.made[key]

    def _once(self, kind: str, index: int, make: Callable[[], list[Stretch]]) -> list[Stretch]:
        """What `make` plays in a module's state, the same stretches each time, and the state after it."""
        module = self.modules[index]
        key = kind, index, module.state
        if key not in self.done:
            made = make()
            self.done[key] = made, module.state
        made, module.state = self.done[key]
        return made

    def _let_go(self, step: Step) -> Iterator[Stretch]:
        """The frees of what the stage drops of a micro-batch after a backward pass or a part of one."""
        kind, index, i = step
        stage = self.modules[index].stage
        if kind == "backward" or (kind == "backward-input") == stage.last:
            yield from self._dropped(("output", index, i))
        if kind not in LAST_PARTS:
            return
        if not stage.first:
            here = index - 1 in self.modules
            held = ("output", index - 1, i) if here else ("received input", index, i)
            if stage.last and kind == "backward":
                self.with_losses.append(held)
            else:
                yield from self._dropped(held)
            if kind == "backward-weight":
                yield from self._dropped(("gradient of the input", index, i))
        if not stage.last:
            here = index + 1 in self.modules
            held = ("gradient of the input", index + 1, i) if here else ("received gradient", index, i)
            yield from self._dropped(held)

    def _dropped(self, held: Held) -> list[Stretch]:
        """Take one holder away; the free of the tensor if it was the last."""
        self.holders[held] -= 1
        if self.holders[held]:
            return []
        what, index, _ = held
        module = self.modules[index]
        frees = {
            "output": module.release,
            "received input": module.release_received_input,
            "received gradient": module.release_received_grad,
            "gradient of the input": module.release_input_grad,
        }
        return [frees[what]]


def extrapolated(
    played: Callable[[int], list[Stretch]], few: int, period: int, times: int
) -> list[Stretch] | None:
    """What `played(few + times * period)` gives, from `few` and two periods more; None if that is not told.

    Each period adds the same stretches at the same places, as three steps of different lengths show.
    """
    if times < LEAST_TIMES:
        return None
    least, more, most = (played(few + n * period) for n in range(3))
    for n_alike in ALIKE:
        added = list(_added(least, more, n_alike))
        if _same(_with(least, added, 1), more) and _same(_with(least, added, 2), most):
            break
    else:
        return None
    loops = [(place, repeated(chain("turns of the schedule", *found), times)) for place, found in added]
    return _with(least, [(place, [loop]) for place, loop in loops], 1)


LEAST_TIMES: Final = 4
"""Repetitions from which on they are counted."""

ALIKE: Final = (64, 32, 16, 8, 4)
"""Lengths of the window by which two steps are aligned; a wrong alignment fails against the third step."""


def _added(
    least: Sequence[Stretch], more: Sequence[Stretch], n_alike: int
) -> Iterator[tuple[int, Sequence[Stretch]]]:
    """The stretches that the longer step has in addition, each with its place in the shorter one."""
    i = j = 0
    while j < len(more):
        if i < len(least) and least[i] is more[j]:
            i, j = i + 1, j + 1
            continue
        ahead = least[i : i + n_alike]
        last = len(more) - len(ahead)
        first = j + 1 if i + n_alike < len(least) else max(j + 1, last)
        ends = (at for at in range(first, last + 1) if _same(more[at : at + len(ahead)], ahead))
        end = next(ends, len(more))
        yield i, more[j:end]
        j = end


def _with(
    least: Sequence[Stretch], added: Iterable[tuple[int, Sequence[Stretch]]], times: int
) -> list[Stretch]:
    """The shorter step with each addition inserted at its place, `times` times."""
    found: list[Stretch] = []
    start = 0
    for place, stretches in added:
        found += [*least[start:place], *[*stretches] * times]
        start = place
    return [*found, *least[start:]]


def _same(one: Sequence[Stretch], other: Sequence[Stretch]) -> bool:
    return len(one) == len(other) and all(map(is_, one, other))
