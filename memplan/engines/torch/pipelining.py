"""A step's passes in order: gradient accumulation on a single stage, and the schedules of pipelines.

Modules are state machines, so a schedule says only which pass comes next. Repetitions are played until one
leaves the state of every module unchanged; the rest are counted.

Source: `torch.distributed.pipelining.schedules:ScheduleGPipe`,
`torch.distributed.pipelining.schedules:Schedule1F1B`,
`torch.distributed.pipelining.schedules:_PipelineScheduleRuntime._step_microbatches`.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from memplan.engines.torch import releasing
from memplan.engines.torch.orders import plan_order
from memplan.engines.torch.stage import RankStages
from memplan.engines.torch.trainer import fetched
from memplan.memory import Alive
from memplan.orders import Action, ActionKind, Loop, counts
from memplan.parts.module import (
    StageModule,
    accumulation,
    backward_pass,
    forward_pass,
    named_pass,
    played,
    repeat,
    turns,
    with_p2p,
)
from memplan.record import Alloc, Free, Stretch, chain, events, frees, passed, repeated
from memplan.shapes import Buffer

Module = StageModule[Any]


def schedule(stages: RankStages, modules: Sequence[Module]) -> list[Stretch]:
    """All passes of a step, given the modules of the rank's stages."""
    plan = stages.plan
    if plan.pp == 1:
        return [*fetched(stages.trainer, plan), *accumulation(modules[0], plan.n_micro_batches)]
    divided = stages.stages[0].divided_inputs
    if not divided.events:
        return _passes(stages, modules)
    held = Counter([e.buffer for e in divided.events if isinstance(e, Alloc)])
    held.subtract([e.buffer for e in divided.events if isinstance(e, Free)])
    left = events("end of context_parallel", frees(*held.elements()))
    return [divided.stretch("context_parallel"), *_passes(stages, modules), left]


def _passes(stages: RankStages, modules: Sequence[Module]) -> list[Stretch]:
    plan, keeps_received = stages.plan, stages.stages[0].keeps_received
    match plan.schedule:
        case "gpipe":
            return (_gpipe if keeps_received else releasing.gpipe)(stages, modules[0])
        case "1f1b":
            one_stage = _one_forward_one_backward if keeps_received else releasing.one_forward_one_backward
            return one_stage(stages, modules[0])
        case _:
            return (_Runtime if keeps_received else releasing.Runtime)(stages, modules).step()


def _gpipe(stages: RankStages, module: Module) -> list[Stretch]:
    """All forwards, then all backwards.

    The last output and the handles of sends are held until the schedule ends, and gloo's handles hold the
    sent tensors. Under NCCL a sent gradient is freed when the variable `ops` is overwritten, before the next
    micro-batch's backward pass.

    Source: `torch.distributed.pipelining.schedules:ScheduleGPipe._step_microbatches`.
    """
    stage, m = module.stage, stages.plan.n_micro_batches
    keeps_outputs = stage.keeps_sent and not stage.last
    keeps_grads = stage.keeps_sent or stage.first

    def backward(i: int) -> Stretch:
        if i == m - 1:
            module.require_gradient_sync()
        sent = [module.release_input_grad] * (i > 0 and not keeps_grads)
        output = [module.release] * (i < m - 1 and not keeps_outputs)
        return backward_pass(module, *sent, module.backward(), *output)

    steps = repeat(m, lambda: forward_pass(module, module.forward()), [module])
    steps += turns(m, {0, 1, m - 1, m}, backward, module)
    input_grads = 0 if stage.first else m if keeps_grads else 1
    return [*steps, *_ended(module, m if keeps_outputs else 1, input_grads, m)]


def _one_forward_one_backward(stages: RankStages, module: Module) -> list[Stretch]:
    """Warm-up forwards, then a backward and a forward in turn, then the backwards left.

    On the last stage a variable of the schedule holds the logits until the next micro-batch overwrites it.
    The last output of every stage is held until the schedule ends, after FSDP2's reductions. Under gloo the
    output sent last during warm-up is held by that send's handle until the variable is overwritten, after the
    last forward pass.

    Source: `torch.distributed.pipelining.schedules:Schedule1F1B._step_microbatches`.
    """
    stage, m = module.stage, stages.plan.n_micro_batches
    warm_up = min(m, stages.plan.pp - stages.rank.pp)
    last_turn, sent_alone = m - warm_up, warm_up - 2
    holds = stage.keeps_sent and not stage.last and 0 <= sent_alone < last_turn

    def turn(i: int) -> Stretch:
        is_freed = not (stage.last or i == m - 1 or (holds and i == sent_alone))
        outputs = is_freed + (holds and i == last_turn)
        key = 0 < i <= last_turn, i == m - 1, i > 0 and not stage.first, outputs
        return module.play(("turn", *key), lambda: made(*key))

    def made(forwards: bool, syncs: bool, sent: bool, outputs: int) -> Stretch:
        forward = forward_pass(module, module.forward(replaces=stage.last)) if forwards else None
        if syncs:
            module.require_gradient_sync()
        freed = *[module.release_input_grad] * sent, *[module.release] * outputs
        backward = backward_pass(module, module.backward(), *freed)
        return backward if forward is None else chain("forward and backward", forward, backward)

    cuts = {0, 1, last_turn, last_turn + 1, m - 1, m} | ({sent_alone, sent_alone + 1} if holds else set())
    steps = repeat(warm_up, lambda: forward_pass(module, module.forward()), [module])
    steps += turns(m, cuts, turn, module)
    return [*steps, *_ended(module, 1, 0 if stage.first else 1, m)]


def _ended(module: Module, outputs: int, input_grads: int, m: int) -> Iterator[Stretch]:
    """FSDP2's reductions, then the frees when the schedule returns."""
    yield from module.reduce_grads()
    yield repeated(module.release, outputs)
    yield repeated(module.release_input_grad, input_grads)
    yield repeated(module.release_loss, m if module.stage.last else 0)


def left_behind(stages: RankStages) -> Alive:
    """The tensors that a schedule holds until the next step begins.

    The first part of a split backward pass stores its result in the `grad` of the received tensor.

    Source: `torch.distributed.pipelining._backward:stage_backward_input`,
    `torch.distributed.pipelining.stage:_PipelineStageBase.clear_runtime_states`.
    """
    alive: Alive = Counter()
    if stages.plan.splits_backward and stages.stages[0].keeps_received:
        times = counts(plan_order(stages.plan, stages.rank.pp))
        for local, stage in enumerate(stages):
            if not stage.first and stages.indices[local] - 1 not in stages.indices:
                alive[stage.trace.boundary_grad] += times.get(Action("backward-input", local), 0)
    return alive


class _Runtime:
    """The actions of one rank's step, for schedules of several stages on a rank or of split backward passes.

    Handles of sends are kept to the end of the step, and gloo's handles hold the sent tensors. A tensor that
    passes between two stages of the same rank is not sent: it replaces the receive buffer.

    Source: `torch.distributed.pipelining.schedules:_PipelineScheduleRuntime._step_microbatches`.
    """

    def __init__(self, stages: RankStages, modules: Sequence[Module]) -> None:
        self.stages, self.indices, self.modules = stages, stages.indices, modules
        self.keeps_sent = stages.stages[0].keeps_sent
        self.order = plan_order(stages.plan, stages.rank.pp)
        self.done: dict[tuple[ActionKind, Module | int, Any], tuple[Stretch, Any]] = {}
        self.own: dict[tuple[Stretch, int], Stretch] = {}
        self.played_as: list[Module | int] = [
            local if self._next_is_here(local) or self._previous_is_here(local) else module.original
            for local, module in enumerate(modules)
        ]

    def step(self) -> list[Stretch]:
        """Frees of what the previous step left, all actions, then the frees when the schedule returns."""
        name, left = "start of the schedule", left_behind(self.stages)
        dropped = [repeated(events(name, frees(buffer)), n) for buffer, n in left.items()]
        return [*dropped, *self._run(self.order), *self._end()]

    def _run(self, loop: Loop) -> list[Stretch]:
        if loop.times == 1:
            return self._once(loop)
        return repeat(loop.times, lambda: _one(self._once(loop)), self.modules)

    def _once(self, loop: Loop) -> list[Stretch]:
        found: list[Stretch] = []
        for part in loop.parts:
            found += [self._act(part)] if isinstance(part, Action) else self._run(part)
        return found

    def _act(self, action: Action) -> Stretch:
        module = self.modules[action.local]
        key = action.kind, self.played_as[action.local], module.state
        if key not in self.done:
            made = self._acted(action, module)
            self.done[key] = made, module.state
        made, module.state = self.done[key]
        return self._own(made, action.local)

    def _own(self, made: Stretch, local: int) -> Stretch:
        """A pass that was played for an equal stage, renamed to this stage."""
        if made.stage_pass is None or made.stage_pass[0] == local:
            return made
        if (made, local) not in self.own:
            self.own[made, local] = passed(local, made.stage_pass[1], *made.parts)
        return self.own[made, local]

    def _acted(self, action: Action, module: Module) -> Stretch:
        local, kind = action.local, action.kind
        if kind in ("unshard", "reshard", "reduce"):
            return _one(played(module, kind))
        if kind == "last-backward":
            module.require_gradient_sync()
        after, before = self._next_is_here(local), self._previous_is_here(local)
        waited = module.wait_for_unshard()
        turns = with_p2p(module, kind, played(module, kind), next_is_here=after, previous_is_here=before)
        return named_pass(module, local, kind, [*waited, *turns, *self._dropped(action, module)])

    def _dropped(self, action: Action, module: Module) -> Iterator[Stretch]:
        """The frees after a pass: the output and the input's gradient, unless a send's handle holds them.

        A tensor that goes to another stage on this rank frees the receive buffer that it replaces.
        """
        (kind, local), stage = action, module.stage
        after, before = self._next_is_here(local), self._previous_is_here(local)
        if kind == "forward":
            if after:
                yield events("hand-over to the next stage", frees(self._received(local, 1)[0]))
            return
        whole = kind in ("backward", "last-backward")
        ends_output = whole or (kind == "backward-input") == stage.last
        if ends_output and not (after or (self.keeps_sent and not stage.last)):
            yield module.release
        if before and kind != "backward-weight":
            yield events("hand-over to the stage before", frees(self._received(local, -1)[1]))
        elif whole and not (self.keeps_sent or stage.first):
            yield module.release_input_grad

    def _received(self, local: int, beyond: int) -> tuple[Buffer, Buffer]:
        """The receive buffers of a neighbouring stage on this rank."""
        return self.stages.received[self.indices.index(self.indices[local] + beyond)]

    def _next_is_here(self, local: int) -> bool:
        return self.indices[local] + 1 in self.indices

    def _previous_is_here(self, local: int) -> bool:
        return self.indices[local] - 1 in self.indices

    def _end(self) -> Iterator[Stretch]:
        """The frees when the schedule returns."""
        m, times = self.stages.plan.n_micro_batches, counts(self.order)
        for local, module in enumerate(self.modules):
            if self.keeps_sent and not (module.stage.last or self._next_is_here(local)):
                yield repeated(module.release, m)
            if self.keeps_sent and not (module.stage.first or self._previous_is_here(local)):
                whole = m - times.get(Action("backward-input", local), 0)
                yield repeated(module.release_input_grad, whole)
            if module.stage.last:
                yield repeated(module.release_loss, m)


def _one(parts: list[Stretch]) -> Stretch:
    return parts[0] if len(parts) == 1 else chain("actions", *parts)
