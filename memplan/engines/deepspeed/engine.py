"""DeepSpeed as an engine: ZeRO-0 to 3 around FusedAdam, in 16 bits."""

from collections.abc import Iterator, Mapping
from typing import final

from memplan.device import Device, DeviceType
from memplan.engines.base import Engine, RankRecord
from memplan.engines.deepspeed.options import DeepSpeedOptions, deepspeed_options
from memplan.engines.deepspeed.pipeline import PipelineEngine, pipeline_stage
from memplan.engines.deepspeed.refusals import REFUSALS
from memplan.engines.deepspeed.runtime import DeepSpeedEngine
from memplan.engines.deepspeed.stage import DeepSpeedStage, PipelineStage
from memplan.errors import MissingRule
from memplan.mesh import Group
from memplan.models import Model, under_deepspeed
from memplan.parts.flat import Partitions, slots_of
from memplan.plan import Plan, Rank
from memplan.tape import Backend


@final
class DeepSpeed(Engine):
    """DeepSpeed 0.19's engine over data-parallel ranks, sequence-parallel (Ulysses) or tensor-parallel ones.

    The tensor-parallel ones are AutoTP's.
    """

    name = "deepspeed"
    axes = ("pp", "dp", "cp", "tp")
    refusals = REFUSALS
    options = DeepSpeedOptions
    confirmed_gpus = ("h100-sxm", "a100-80-sxm")

    def offloads(self, plan: Plan) -> bool:
        return deepspeed_options(plan).offload_optimizer != "none"

    def check_device(self, plan: Plan, device: Device) -> None:
        for axis, method in (("cp", "Ulysses"), ("tp", "AutoTP")):
            if device.on_cpu and (n := getattr(plan, axis)) > 1:
                raise MissingRule(
                    f"{axis}={n}: DeepSpeed's {method} has rules on GPUs only; use a cluster, or {axis}=1.",
                    kind=f"DeepSpeed's {method} on CPU ranks",
                )

        if device.on_cpu and deepspeed_options(plan).activation_checkpoint_interval:
            raise MissingRule(
                "activation_checkpoint_interval: DeepSpeed's checkpointing has rules on GPUs only; use a "
                "cluster, or leave it out.",
                kind="DeepSpeed's checkpointing on CPU ranks",
            )

    def n_communicators(self, plan: Plan) -> int:
        """One more for the ranks that divide hpZ's copy of the weights."""
        return super().n_communicators(plan) + (deepspeed_options(plan).zero_hpz_partition_size > 1)

    def notes(self, model: Model, plan: Plan) -> Iterator[str]:
        if plan.cp > 1:
            yield (
                f"cp={plan.cp} divides each sequence of {model.name} by DeepSpeed's Ulysses "
                "(UlyssesSPAttentionHF): in attention a rank has whole sequences of some heads. States are "
                "divided, or gradients averaged, over dp x cp; gradients are sent in float32."
            )
        if plan.tp > 1:
            yield (
                f"tp={plan.tp} divides the linears of {model.name} by DeepSpeed's AutoTP, as transformers' "
                "plan for it says: each adds up its outputs, or the gradients of its input, over tp. Each "
                "rank has the whole embedding, if that shares no weight with the head."
            )
        if plan.cp > 1 and not plan.zero:
            yield (
                f"ZeRO-0 takes the {plan.cp} ranks of a sequence for tensor-parallel ones: all but the first "
                "mask their gradients for the norm, with 9 bytes for each weight. zero=1 does not."
            )

    def divided(self, model: Model, plan: Plan, mesh: Mapping[Group, int], device: DeviceType) -> Model:
        degrees = {axis: mesh.get(axis, 1) for axis in ("cp", "tp")}
        if degrees["tp"] > 1 and (degrees["cp"] > 1 or plan.zero == 3):
            return model  # refused as a plan
        return under_deepspeed(model, device, plan.precision, zero3=plan.zero == 3, **degrees)

    def play(self, model: Model, plan: Plan, device: Device) -> Iterator[RankRecord]:
        """The record of the fullest of three ranks.

        ZeRO-1 reduces the first one's gradients first; one has most whole gradients; the last one is padded.
        Under ZeRO-0 the last one of a sequence, or of a tensor group, masks its gradients.
        """
        stage = DeepSpeedStage(model, plan, device, None)
        if plan.pp > 1:
            yield from _pipeline_ranks(stage)
            return
        n = plan.n_shards
        fullest = Partitions(slots_of(stage.trained), n).fullest_rank() if plan.zero else 0
        places = dict.fromkeys((0, fullest, n - 1) if plan.zero in (1, 2) else (plan.cp - 1,))
        tp = 0 if plan.zero else plan.tp - 1
        ranks = [Rank(dp=place // plan.cp, cp=place % plan.cp, tp=tp) for place in places]
        played = [DeepSpeedEngine(stage, rank).record() for rank in ranks]
        yield max(played, key=lambda record: record.peak_bytes)

    def play_rank(
        self, model: Model, plan: Plan, rank: Rank, device: Device, backend: Backend | None
    ) -> RankRecord:
        stage = DeepSpeedStage(model, plan, device, backend)
        if plan.pp > 1:
            return PipelineEngine(pipeline_stage(stage, rank, {}), rank).record()
        return DeepSpeedEngine(stage, rank).record()


def _pipeline_ranks(whole: DeepSpeedStage) -> Iterator[RankRecord]:
    """The record of the fullest rank of each stage of a pipeline."""
    plan, known = whole.plan, dict[object, PipelineStage]()
    for pp in range(plan.pp):
        stage = pipeline_stage(whole, Rank(pp=pp), known)
        n = plan.n_shards
        fullest = Partitions(slots_of(stage.trained), n).fullest_rank() if plan.zero else 0
        places = dict.fromkeys((0, fullest, n - 1) if plan.zero else (0,))
        played = [PipelineEngine(stage, Rank(pp=pp, dp=place)).record() for place in places]
        yield max(played, key=lambda record: record.peak_bytes)


DEEPSPEED = DeepSpeed()
