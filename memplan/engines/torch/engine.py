"""Stock PyTorch as an engine: which ranks are played, and what is shared between them."""

from collections.abc import Iterator
from typing import final

from memplan.device import Device
from memplan.engines.base import Confirmation, Engine, PartCosts, RankRecord
from memplan.engines.torch.refusals import REFUSALS, check_device
from memplan.engines.torch.stage import RankStages, Stage, StageKind
from memplan.engines.torch.step import Player
from memplan.engines.trace import Segment
from memplan.models import Model
from memplan.plan import Plan, Rank
from memplan.record import Collective, Compute
from memplan.shapes import Parameter
from memplan.tape import Backend


@final
class TorchEngine(Engine):
    """DDP, ZeroRedundancyOptimizer, FSDP2, tensor parallelism and pipelining as PyTorch runs them."""

    name = "torch"
    plays = "PyTorch 2.13"
    refusals = REFUSALS
    gives_bounds = True

    def check_device(self, plan: Plan, device: Device) -> None:
        check_device(plan, device)

    def confirmed_on(self, device: Device) -> Confirmation:
        return "measured" if device.on_cpu else "unmeasured"

    def play(self, model: Model, plan: Plan, device: Device) -> Iterator[RankRecord]:
        played = Player()
        for stages in ranks_of(model, plan, device):
            yield played(stages)

    def play_rank(
        self, model: Model, plan: Plan, rank: Rank, device: Device, backend: Backend | None
    ) -> RankRecord:
        return Player()(RankStages(model, plan, rank, device, backend=backend))

    def notes(self, model: Model, plan: Plan) -> Iterator[str]:
        if plan.zero == 1 and plan.dp > 1:
            yield (
                "zero=1 is DistributedDataParallel with torch's ZeroRedundancyOptimizer, which deals out "
                "whole tensors: ranks hold unequal parts, and the fullest rank is shown."
            )

    def part_costs(self, model: Model, plan: Plan, device: Device) -> PartCosts:
        return part_costs(self, model, plan, device)


def ranks_of(model: Model, plan: Plan, device: Device) -> Iterator[RankStages]:
    """Of each rank of the pipeline the one that holds most."""
    known: dict[StageKind, Stage] = {}
    alike: dict[tuple[Stage, ...], RankStages] = {}
    for pp_rank in range(plan.pp):
        stages = RankStages(model, plan, Rank(pp=pp_rank), device, known)
        like = alike.get(stages.stages)
        stages = stages.on_fullest_rank() if like is None else like.moved(pp_rank)
        alike[stages.stages] = stages
        yield stages


def part_costs(engine: TorchEngine, model: Model, plan: Plan, device: Device) -> PartCosts:
    """One micro-batch of a model of two blocks, of which the first is recomputed if the plan recomputes."""
    stage = Stage(model, plan, (True, True, 2), device)
    trace, (again, *others) = stage.trace, stage.trace.blocks
    plain = others[0] if others else again

    def elements(parameters: tuple[Parameter, ...]) -> int:
        return sum([p.n_elements for p in parameters])

    def net(*segments: Segment) -> int:
        return sum([segment.stretch("").net_bytes for segment in segments])

    def flops(segment: Segment) -> int:
        return sum([event.flops for event in segment.events if isinstance(event, Compute)])

    def sent(*segments: Segment) -> int:
        return sum(
            [
                engine.wire_bytes(event.kind, event.payload_bytes, plan.tp)
                for segment in segments
                for event in segment.events
                if isinstance(event, Collective)
            ]
        )

    ends = trace.embed, trace.head, trace.loss, trace.head_backward, trace.embed_backward
    return PartCosts(
        embedding_elements=elements(trace.embed_parameters),
        block_elements=elements(trace.block_parameters),
        head_elements=elements(trace.head_parameters),
        block_flops=flops(again.forward),
        head_flops=flops(trace.head),
        again_flops=flops(again.backward),
        sent_bytes=sent(*ends) + model.n_layers * sent(plain.forward, plain.backward),
        sent_again_bytes=sent(again.forward, again.backward) - sent(plain.forward, plain.backward),
        embedding_saved=net(trace.embed, trace.embed_casts),
        block_saved=net(plain.forward, plain.casts),
        again_saved=net(again.forward, again.casts),
        head_saved=net(trace.head, trace.head_casts, trace.loss),
        boundary_bytes=trace.boundary.n_bytes,
    )


TORCH = TorchEngine()
