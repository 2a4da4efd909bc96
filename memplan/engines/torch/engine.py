"""Stock PyTorch as an engine: which ranks are played, and what is shared between them."""

from collections.abc import Iterator
from typing import Any, final

from memplan.device import Device
from memplan.engines.base import DataParallelism, Engine, PartCosts, RankRecord
from memplan.engines.costs import part_costs
from memplan.engines.torch.dtensor import MOST_GPUS_OF_A_HOST
from memplan.engines.torch.flat_parameter import FlatRankStages
from memplan.engines.torch.options import TorchOptions, compiled_blocks, merges_adapters, torch_options
from memplan.engines.torch.refusals import REFUSALS, check_device
from memplan.engines.torch.sharding import padding_note
from memplan.engines.torch.stage import RankStages, Stage
from memplan.engines.torch.step import Player
from memplan.mesh import AXES
from memplan.models import Layers, Model, TracedModel, counted_weights
from memplan.models.traced import is_of_torchtitan
from memplan.optimizers import LEAST_PAGED, OPTIMIZERS
from memplan.parts.stage import StageKind
from memplan.plan import Plan, Rank
from memplan.shapes import FP32
from memplan.tape import Backend


@final
class TorchEngine(Engine):
    """DDP, ZeroRedundancyOptimizer, FSDP, tensor parallelism and pipelining as PyTorch 2.13 runs them."""

    name = "torch"
    axes = tuple(AXES.own)
    views = ("ep",)
    refusals = REFUSALS
    options = TorchOptions
    gives_bounds = True
    trains_adapters = True
    optimizers = OPTIMIZERS
    confirmed_gpus = ("a100-80-sxm", "h100-sxm", "h200", "b200")
    confirmed_on_cpu = True

    def check_device(self, plan: Plan, device: Device) -> None:
        check_device(plan, device)

    def offloads(self, plan: Plan) -> bool:
        return plan.offload or plan.kept.on_host

    def copies_to_host(self, plan: Plan) -> bool:
        return torch_options(plan).activation_offloading != "none"

    def play(self, model: Model, plan: Plan, device: Device) -> Iterator[RankRecord]:
        played = Player()
        for stages in ranks_of(model, plan, device):
            yield played(stages)

    def play_rank(
        self, model: Model, plan: Plan, rank: Rank, device: Device, backend: Backend | None
    ) -> RankRecord:
        return Player()(rank_stages(plan)(model, plan, rank, device, backend=backend))

    def notes(self, model: Model, plan: Plan) -> Iterator[str]:
        if plan.zero == 1 and plan.ddp:
            yield (
                "zero=1 is DistributedDataParallel with torch's ZeroRedundancyOptimizer, which deals out "
                "whole tensors: ranks hold unequal parts, and the fullest rank is shown."
            )
        if plan.fsdp and not model.n_blocks:
            yield (
                f"{model.name} has no repeated blocks that are known: FSDP gathers it as one unit. Name its "
                "lists of blocks, as --blocks model.layers, or memplan.trace(..., blocks='model.layers')."
            )
        if plan.tp > 1 and model.config_values() is not None:
            yield (
                f"tp={plan.tp} divides {model.name} by its framework's own plan (of transformers: "
                "base_model_tp_plan). What that plan does not name, such as norms, each rank has whole."
            )
        if plan.cp > 1:
            yield (
                f"cp={plan.cp} divides each sequence of {model.name} by PyTorch's context_parallel: ring "
                "attention, and weights sharded, or their gradients averaged, over dp x cp. Ranks of a "
                "sequence hold nearly the same; the first one is shown."
            )
        if plan.ep > 1 and not is_of_torchtitan(model):
            yield (
                f"ep={plan.ep} divides the experts of {model.name} as transformers does (base_model_ep_plan, "
                "an all-to-all to the experts and one back). Tokens are taken to choose all experts equally "
                "often: a rank whose experts are chosen more holds more activations, in proportion."
            )
            own = model.n_experts // plan.ep
            if 0 < own < plan.efsdp:
                yield (
                    f"Each rank has {own} of a block's experts, and {plan.efsdp} ranks have the same: FSDP2 "
                    f"shards whole experts, so {plan.efsdp - own} of them hold none, and what is gathered is "
                    f"padded {plan.efsdp / own:.3g} times. Use a larger ep, or dp_replicate."
                )
        if plan.fsdp and torch_options(plan).fsdp_version == 1:
            yield (
                "FSDP1 calls record_stream: the allocator reuses a block only once the other stream is done. "
                "The reserved bytes assume that it is done at once; runs without a GPU that assumed the "
                "latest time reserved up to 10.6 % more, and 67 % more with limit_all_gathers=False. "
                "limit_all_gathers=True is planned."
            )
        held = set(model.trained_dtypes) - {FP32.name} if isinstance(model, TracedModel) else ()
        if held and plan.formats.stored == FP32:
            yield (
                f"{model.name} holds weights that it trains in {' and '.join(sorted(held))}; precision="
                f"{plan.precision!r} stores them in float32. Use precision='bf16' for weights in bfloat16."
            )
        padding = ""
        if plan.fsdp and plan.tp == plan.ep == 1 and torch_options(plan).fsdp_version == 2:
            padding = padding_note(counted_weights(model), plan.n_shards, plan.formats.gather.itemsize)
        if padding:
            yield padding
        yield from _said_of_options(plan)
        version = torch_options(plan).torch_version
        if version != "2.13":
            yield (
                f"torch_version={version}: what it does differently from 2.13 was compared on up to "
                "8 ranks of small models (without a GPU); most plans on file ran with 2.13."
            )

    def part_costs(self, model: Model, plan: Plan, device: Device) -> PartCosts:
        stages = [Stage(model, plan, (True, True, (Layers(kind, 2),)), device) for kind in model.kinds]
        traces = [stage.traced((kind,)) for stage in stages for kind in dict(stage.runs)]
        blocks = [block for each in traces for block in each.blocks.items()]
        plain = {kind.kind: block for kind, block in blocks if kind.recompute == "none"}
        again = {kind.kind: block for kind, block in blocks if kind.recompute != "none"} or plain
        keeps_received = stages[0].keeps_received
        return part_costs(traces[0], plain, again, self.wire_bytes, plan.tp, keeps_received=keeps_received)

    def data_parallelism(
        self, plan: Plan, elements: Any, block_elements: Any, single_stage: Any
    ) -> DataParallelism:
        from memplan.engines.torch.bounds import data_parallelism  # needs NumPy, as only a search does

        return data_parallelism(plan, elements, block_elements, single_stage)


def _said_of_options(plan: Plan) -> Iterator[str]:
    if torch_options(plan).trainer != "none" and plan.clip_grad_norm is None:
        yield (
            "clip_grad_norm is left out: the Trainer then takes the norm of the gradients and clips none. "
            "Its own default is max_grad_norm=1.0."
        )
    if compiled_blocks(plan):
        yield (
            "The step time of compiled blocks takes each fused kernel to move three bytes for each one that "
            "it allocates, and its band is that of eager code: twelve published runs of compiled blocks had "
            "0.75 to 1.16 times the rate."
        )
    if compiled_blocks(plan) and plan.tp > 1:
        yield (
            "A step is predicted that waits for the embedding's collective before the first compiled block. "
            "PyTorch 2.13 waits for it too, but loses the gradient, so that no embedding is trained (pytorch "
            "pull request 191113)."
        )
    if torch_options(plan).trainer == "grpo" and plan.adapters is not None and not merges_adapters(plan):
        what = "use_dora=True" if plan.adapters.dora else f"quantize={plan.adapters.quantize!r}"
        yield (
            f"{what} with trainer='grpo': before completions are generated PEFT makes each weight anew, with "
            "its adapters merged into it, and back after, one weight after the other. That is not counted."
        )
    rows = plan.adapters.rank if plan.adapters is not None and merges_adapters(plan) else 0
    if plan.fsdp and 1 < plan.n_shards <= min(rows, MOST_GPUS_OF_A_HOST):
        yield (
            "trainer='grpo' with lora_rank: DTensor divides the products of adapters by the number of GPUs "
            "that a process sees. They are counted for ranks on several hosts; where all "
            f"{plan.n_shards} are on one, merging adapters may take less."
        )
    if plan.kept.paged:
        yield (
            f"optimizer={plan.optimizer!r} keeps the state of weights of {LEAST_PAGED:,} elements or more in "
            "memory that CUDA moves between GPU and host as needed: it is in no figure here."
        )


def rank_stages(plan: Plan) -> type[RankStages]:
    """The stages of a rank as the plan's wrapper stores their parameters."""
    return FlatRankStages if plan.fsdp and torch_options(plan).fsdp_version == 1 else RankStages


def ranks_of(model: Model, plan: Plan, device: Device) -> Iterator[RankStages]:
    """The data-parallel rank that holds most, for each rank of the pipeline."""
    known: dict[StageKind, Stage] = {}
    fullest: dict[tuple[Stage, ...], RankStages] = {}
    for pp_rank in range(plan.pp):
        stages = rank_stages(plan)(model, plan, Rank(pp=pp_rank), device, known)
        like = fullest.get(stages.stages)
        fullest[stages.stages] = stages.on_fullest_rank() if like is None else like.at(pp=pp_rank)
        yield fullest[stages.stages]


TORCH = TorchEngine()
