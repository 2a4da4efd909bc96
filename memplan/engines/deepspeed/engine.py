"""DeepSpeed as an engine: ZeRO-0 to 3 around FusedAdam, in 16 bits."""

from collections.abc import Iterator
from typing import final

from memplan.device import Device
from memplan.engines.base import Engine, RankRecord
from memplan.engines.deepspeed.options import DeepSpeedOptions, deepspeed_options
from memplan.engines.deepspeed.refusals import REFUSALS
from memplan.engines.deepspeed.runtime import DeepSpeedEngine
from memplan.engines.deepspeed.stage import DeepSpeedStage
from memplan.models import Model
from memplan.parts.flat import Partitions, slots_of
from memplan.plan import Plan, Rank
from memplan.tape import Backend


@final
class DeepSpeed(Engine):
    """DeepSpeed 0.19's engine over data-parallel ranks."""

    name = "deepspeed"
    axes = ("dp",)
    refusals = REFUSALS
    options = DeepSpeedOptions
    confirmed_gpus = ("h100-sxm", "a100-80-sxm")

    def offloads(self, plan: Plan) -> bool:
        return deepspeed_options(plan).offload_optimizer != "none"

    def n_communicators(self, plan: Plan) -> int:
        """One more for the ranks that divide hpZ's copy of the weights."""
        return super().n_communicators(plan) + (deepspeed_options(plan).zero_hpz_partition_size > 1)

    def play(self, model: Model, plan: Plan, device: Device) -> Iterator[RankRecord]:
        """The record of the fullest of three ranks.

        ZeRO-1 reduces the first one's gradients first; one has most whole gradients; the last one is padded.
        """
        stage = DeepSpeedStage(model, plan, device, None)
        fullest = Partitions(slots_of(stage.trained), plan.dp).fullest_rank() if plan.zero else 0
        ranks = dict.fromkeys((0, fullest, plan.dp - 1) if plan.zero in (1, 2) else (0,))
        played = [DeepSpeedEngine(stage, Rank(dp=rank)).record() for rank in ranks]
        yield max(played, key=lambda record: record.peak_bytes)

    def play_rank(
        self, model: Model, plan: Plan, rank: Rank, device: Device, backend: Backend | None
    ) -> RankRecord:
        return DeepSpeedEngine(DeepSpeedStage(model, plan, device, backend), rank).record()


DEEPSPEED = DeepSpeed()
