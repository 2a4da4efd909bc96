"""A step of the schedules that list a rank's actions: several stages on a rank, backward passes in two parts.

Source: torch/distributed/pipelining/schedules.py (`_PipelineScheduleRuntime._step_microbatches`), stage.py.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, cast

from memplan.engines.torch.fsdp import ShardedPasses
from memplan.engines.torch.orders import Action, Kind, Run, plan_counts, plan_order
from memplan.engines.torch.passes import Passes
from memplan.engines.torch.stage import RankStages
from memplan.memory import Alive
from memplan.plan import SPLITTING_SCHEDULES
from memplan.record import PassPart, Stretch, chain, events, frees, passed, repeated
from memplan.shapes import Buffer
from memplan.tape import HOLD_WHAT_IS_SENT

Weights = Literal["sharded", "freed after forward", "whole"]
"""What FSDP2 has of a stage's weights: after a forward pass it frees those of the units that reshard."""


class Progress(NamedTuple):
    """Where a stage stands in a step.

    Its weights, if they have yet to arrive, if it has gradients, and if it has them in the wider type of
    their sum, to which FSDP2 adds the others in the next pass. Where that `defers` some: if its blocks were
    last run to be recomputed, and of each micro-batch under way if they were before its forward pass.
    """

    weights: Weights = "whole"
    arriving: bool = False
    graded: bool = False
    summed: bool = False
    recomputed: bool = False
    late: tuple[bool, ...] = ()


def run_actions(stages: RankStages, passes: Sequence[Passes]) -> list[Stretch]:
    """The rank's actions, what the schedule holds of each, and what it drops when it returns."""
    runtime = _Runtime(stages, passes)
    return [*runtime.start(), runtime.run(), *runtime.end()]


def left_behind(stages: RankStages) -> Alive:
    """What a schedule leaves until the next step begins.

    The first part of a split backward pass leaves its result in the received tensor's `grad`.

    Source: torch/distributed/pipelining/_backward.py (`stage_backward_input`), stage.py
    (`clear_runtime_states`).
    """
    alive: Alive = Counter()
    if stages.plan.pp > 1 and stages.plan.schedule in SPLITTING_SCHEDULES:
        counts = plan_counts(stages.plan, stages.rank.pp)
        for local, stage in enumerate(stages):
            if not stage.first and stages.indices[local] - 1 not in stages.indices:
                alive[stage.trace.boundary_grad] += counts.get(Action("backward-input", local), 0)
    return alive


class _Runtime:
    """The actions of one rank's step.

    Handles of what is sent are kept to the end, and gloo's hold the tensors. What passes between two stages
    of the same rank is not sent: it takes the place of the buffer that the last step has left.
    """

    def __init__(self, stages: RankStages, passes: Sequence[Passes]) -> None:
        plan = stages.plan
        self.stages = stages
        self.indices = stages.indices
        self.passes = passes
        self.sharded = cast(Sequence[ShardedPasses], passes if plan.fsdp else ())
        self.keeps_sent = stages.backend in HOLD_WHAT_IS_SENT
        self.reshards = plan.zero == 3
        self.order = plan_order(plan, stages.rank.pp)
        self.done: dict[tuple[Kind, Passes | int, Progress], tuple[Stretch, Progress]] = {}
        self.alike: list[Passes | int] = [
            local if self._next_is_here(local) or self._previous_is_here(local) else one
            for local, one in enumerate(passes)
        ]

    def start(self) -> Iterator[Stretch]:
        """What the last step has left is dropped."""
        for buffer, n in left_behind(self.stages).items():
            yield repeated(events("start of the schedule", frees(buffer)), n)

    def run(self) -> Stretch:
        """All actions."""
        return self._run(self.order, [Progress() for _ in self.passes])

    def _run(self, run: Run, states: list[Progress]) -> Stretch:
        """A run from these states on, which it changes; repetitions are alike once one leaves them alone."""
        if run.once:
            return self._once(run, states)
        n_left = run.times
        parts: list[Stretch] = []
        while n_left > 0:
            before = states.copy()
            turn = self._once(run, states)
            if states == before:
                parts.append(repeated(turn, n_left))
                break
            parts.append(turn)
            n_left -= 1
        return parts[0] if len(parts) == 1 else chain("actions", *parts)

    def _once(self, run: Run, states: list[Progress]) -> Stretch:
        parts = [
            self._act(part, states) if isinstance(part, Action) else self._run(part, states)
            for part in run.parts
        ]
        return parts[0] if len(parts) == 1 else chain("actions", *parts)

    def _act(self, action: Action, states: list[Progress]) -> Stretch:
        state = states[action.local]
        key = action.kind, self.alike[action.local], state
        if key not in self.done:
            self.done[key] = self._acted(action, state)
        done, states[action.local] = self.done[key]
        return done

    def _acted(self, action: Action, state: Progress) -> tuple[Stretch, Progress]:
        local = action.local
        match action.kind:
            case "unshard":
                done, after = self.sharded[local].unshard(), state._replace(weights="whole", arriving=True)
            case "reshard":
                done, after = self._reshard(local, state.weights), state._replace(weights="sharded")
            case "reduce":
                reduced = self.passes[local].reduced(summed=state.summed, pending=state.graded)
                done = chain("gradient reduction", *reduced)
                after = state._replace(weights="sharded")
            case _:
                arrived = [self.sharded[local].wait_for_unshard()] if state.arriving else []
                part: PassPart = "backward" if action.kind == "last-backward" else action.kind
                done = passed(local, part, *arrived, *self._pass(action, state))
                after = self._after(action, state)
                if self.passes[local].defers:
                    after = _entered(action, after)
        return done, after

    def _reshard(self, local: int, weights: Weights) -> Stretch:
        if weights == "sharded":
            return chain("freeing of a stage's weights")
        return self.sharded[local].reshard(freed_after_forward=weights != "whole")

    def _after(self, action: Action, state: Progress) -> Progress:
        state = state._replace(weights="whole", arriving=False)
        match action.kind:
            case "forward":
                return state._replace(weights="freed after forward" if self.reshards else "whole")
            case "backward-weight":
                if not self.passes[action.local].stage.first:
                    return state._replace(graded=True)
            case "backward-input":
                if self.passes[action.local].stage.first or not state.graded:
                    return state
        if self.passes[action.local].accumulates_in_fp32:
            return state._replace(graded=False, summed=True)
        return state._replace(graded=state.graded or action.kind != "backward-input")

    def _pass(self, action: Action, state: Progress) -> Iterator[Stretch]:
        local, passes, whole = action.local, self.passes[action.local], state.weights == "whole"
        first = not (state.summed if passes.accumulates_in_fp32 else state.graded)
        pending, late = passes.accumulates_in_fp32 and state.graded, any(state.late[:1])
        match action.kind:
            case "forward":
                if not (passes.stage.first or self._previous_is_here(local)):
                    yield passes.fwd_recv
                yield passes.forward(first=False, unsharded=whole)
                if not (passes.stage.last or self._next_is_here(local)):
                    yield passes.fwd_send
                if self._next_is_here(local):
                    yield events("hand-over to the next stage", frees(self._received(local, 1)[0]))
            case "backward" | "last-backward":
                last = action.kind == "last-backward"
                yield from self._bwd_recv(local)
                yield passes.backward(first=first, last=last, unsharded=whole, pending=pending, late=late)
                yield from self._bwd_send(local)
                yield from self._outputs(local, dropped=True)
                yield from self._input_grad(local, dropped=not self.keeps_sent)
            case "backward-input" if passes.stage.first:
                yield from self._bwd_recv(local)
            case "backward-input":
                yield from self._bwd_recv(local)
                yield passes.backward_input(first=first, pending=pending, late=late)
                yield from self._bwd_send(local)
                yield from self._outputs(local, dropped=passes.stage.last)
                yield from self._input_grad(local, dropped=False)
            case "backward-weight":
                if passes.stage.first:
                    yield passes.backward(first=first, unsharded=whole, pending=pending)
                else:
                    yield passes.backward_weight(first=not state.graded)
                yield from self._outputs(local, dropped=not passes.stage.last)

    def _bwd_recv(self, local: int) -> Iterator[Stretch]:
        passes = self.passes[local]
        if not (passes.stage.last or self._next_is_here(local)):
            yield passes.bwd_recv

    def _bwd_send(self, local: int) -> Iterator[Stretch]:
        passes = self.passes[local]
        if not (passes.stage.first or self._previous_is_here(local)):
            yield passes.bwd_send

    def _outputs(self, local: int, *, dropped: bool) -> Iterator[Stretch]:
        """A stage's output is dropped unless it has been sent and is kept, or the next stage has it."""
        kept = self._next_is_here(local) or (self.keeps_sent and not self.passes[local].stage.last)
        if dropped and not kept:
            yield self.passes[local].release()

    def _input_grad(self, local: int, *, dropped: bool) -> Iterator[Stretch]:
        """The input's gradient takes the last step's place in the stage before, if that is here."""
        if self._previous_is_here(local):
            yield events("hand-over to the stage before", frees(self._received(local, -1)[1]))
        elif dropped and not self.passes[local].stage.first:
            yield self.passes[local].release_input_grad()

    def _received(self, local: int, beyond: int) -> tuple[Buffer, Buffer]:
        """What a neighbour of a stage, that this rank has too, still holds of the last step's micro-batch."""
        return self.stages.received[self.indices.index(self.indices[local] + beyond)]

    def _next_is_here(self, local: int) -> bool:
        return self.indices[local] + 1 in self.indices

    def _previous_is_here(self, local: int) -> bool:
        return self.indices[local] - 1 in self.indices

    def end(self) -> Iterator[Stretch]:
        """What the schedule drops when it returns."""
        m, counts = self.stages.plan.n_micro_batches, plan_counts(self.stages.plan, self.stages.rank.pp)
        for local, passes in enumerate(self.passes):
            if self.keeps_sent and not (passes.stage.last or self._next_is_here(local)):
                yield repeated(passes.release(), m)
            if self.keeps_sent and not (passes.stage.first or self._previous_is_here(local)):
                whole = m - counts.get(Action("backward-input", local), 0)
                yield repeated(passes.release_input_grad(), whole)
            if passes.stage.last:
                yield repeated(passes.release_loss(), m)


def _entered(action: Action, state: Progress) -> Progress:
    """A stage after a pass, with what its units take that for."""
    match action.kind:
        case "forward":
            return state._replace(recomputed=False, late=(*state.late, state.recomputed))
        case "backward-weight":
            return state._replace(recomputed=True)
        case _:
            return state._replace(late=state.late[1:])
