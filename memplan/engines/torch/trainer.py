"""transformers' Trainer: what its loop holds beside the passes of a plain one.

It fetches the micro-batches of a step at once, each with a mask of padding that is all ones, and counts their
tokens on all ranks; until the next step's are there it holds them, and the last loss and norm.

Neglects: what is allocated to count tokens.
Source: transformers.trainer (`Trainer._run_epoch`, `Trainer.get_batch_samples`), 5.23.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, final

from memplan.engines.torch.merging import Adapted, merged, unmerged
from memplan.engines.torch.options import torch_options
from memplan.models import Model
from memplan.passes.trace import Trace
from memplan.plan import Plan
from memplan.record import Alloc, Collective, Event, Free, Stretch, allocs, events, frees
from memplan.shapes import BOOL, FP32, INT64, Buffer, DType, Parameter, buffer_of

MASK: Final = "mask of padding"
N_TOKENS: Final = "tokens of the batch"
FOR_SERVER: Final = "weights for the server"

GIVEN: Final = ("attention_mask", "num_items_in_batch")
"""What the Trainer gives a traced module beside tokens and labels."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class KeptByTrainer:
    """What the Trainer keeps from step to step.

    Attributes:
        batch: the tensors of the micro-batches, and the number of their tokens, if it is counted.
        ahead: the next micro-batch, which is on the host: counted if the step runs there.
        last_loss: the last micro-batch's loss, which lives until that of the next is there.
        norm: the norm of the gradients.
        losses: the sum of the losses since the last log.
        for_server: whole weights for a server of vLLM; each is freed when the next has been gathered.
        adapted: the weights that have adapters, which are merged into them meanwhile.
    """

    batch: tuple[Buffer, ...]
    ahead: tuple[Buffer, ...]
    last_loss: Buffer
    norm: Buffer
    losses: Buffer
    for_server: tuple[Buffer, ...] = ()
    adapted: tuple[Adapted, ...] = ()

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """All of them."""
        return (*self.batch, *self.ahead, self.last_loss, self.norm, self.losses)

    @property
    def replaced(self) -> tuple[Buffer, ...]:
        """The buffers that are freed once the next step has allocated its own."""
        return (*self.batch, self.last_loss)


def counts_tokens(plan: Plan) -> bool:
    """Whether the trainer counts the tokens of a step's batch on all ranks.

    TRL's DPOTrainer does not; its GRPOTrainer counts tokens of completions when these are generated.
    """
    return torch_options(plan).trainer not in ("dpo", "grpo")


def kept_by_trainer(
    model: Model,
    plan: Plan,
    trace: Trace,
    weight_dtype: DType,
    whole: tuple[Buffer, ...],
    with_adapters: tuple[Adapted, ...],
    *,
    on_host: bool,
) -> KeptByTrainer:
    """What the Trainer keeps of a model with this trace; `whole`: its weights that are sharded.

    Source: accelerate.data_loader (`DataLoaderShard.__iter__`: one micro-batch ahead).
    """
    mask = buffer_of(MASK, (plan.micro_batch, plan.seq_len), INT64)
    own = model.inputs(plan.micro_batch, plan.seq_len)
    each = mask, *[one for one in own if one.name not in GIVEN]
    batch = *each * plan.n_micro_batches, *[buffer_of(N_TOKENS, (), FP32)] * counts_tokens(plan)
    if torch_options(plan).trainer == "grpo":
        each, batch = (), tuple([_of_step(one, plan.n_micro_batches) for one in own])
    freed = [event.buffer for event in trace.end_of_backward.events if isinstance(event, Free)]
    losses = [buffer for buffer in freed if buffer.shape == ()]
    return KeptByTrainer(
        batch=batch,
        ahead=each if on_host else (),
        last_loss=losses[-1],
        norm=buffer_of("norm of the gradients", (), weight_dtype),
        losses=buffer_of("losses so far", (), FP32),
        for_server=whole if torch_options(plan).trainer == "grpo" else (),
        adapted=with_adapters,
    )


def _of_step(one: Buffer, n_micro_batches: int) -> Buffer:
    """A tensor of a whole step, for one of a micro-batch: GRPOTrainer generates for a step at once.

    A tensor without dims, as a number of tokens, stays as it is.
    """
    first, *others = one.shape or (1,)
    return buffer_of(one.name, (n_micro_batches * first, *others) if one.shape else (), one.dtype)


def gathered(weight: Parameter, plan: Plan) -> Collective:
    """The all-gather of a weight that is a DTensor, divided evenly.

    Source: `torch.distributed.tensor:DTensor.full_tensor`.
    """
    n_bytes = weight.n_elements * plan.formats.gather.itemsize
    return Collective(kind="all_gather", axis="dp", what=weight.name, payload_bytes=n_bytes)


def _type_of_scores(plan: Plan) -> DType:
    """The type in which a module under a trainer returns scores of tokens: FSDP2 casts them."""
    return plan.formats.gather if plan.fsdp and plan.mixed else FP32


def metrics_of_tokens(plan: Plan) -> Iterator[Collective]:
    """The numbers of a micro-batch that TRL's SFTTrainer gathers from all ranks.

    Neglects: the bytes of their sums.
    Source: trl.trainer.sft_trainer (`SFTTrainer.compute_loss`), 1.16; accelerate.utils.operations
    (`_gpu_gather`).
    """
    n, scored = plan.world_size, _type_of_scores(plan)
    metrics = {"tokens with a target": INT64, "entropy": scored, "tokens predicted": INT64, "tokens": INT64}
    for what, dtype in metrics.items() if n > 1 else ():
        yield Collective(kind="all_gather", axis="dp", what=what, payload_bytes=n * dtype.itemsize)


def metrics_of_pairs(plan: Plan) -> Iterator[Collective]:
    """The numbers of a micro-batch, and of each of its pairs, that TRL's DPOTrainer gathers from all ranks.

    Neglects: the bytes of their sums.
    Source: trl.trainer.dpo_trainer (`DPOTrainer._compute_loss`), 1.16.
    """
    n, pairs, scored = plan.world_size, plan.micro_batch // 2, _type_of_scores(plan)
    compared = FP32 if torch_options(plan).precompute_ref_log_probs else scored  # with numbers of the batch
    each = (
        ("entropy and logits", 3, scored, 1), ("numbers of tokens", 6, INT64, 1),
        ("rewards and margins", 3, compared, pairs), ("log-probabilities", 2, scored, pairs),
        ("right orders", 1, FP32, pairs),
    )  # fmt: skip
    for what, calls, dtype, n_numbers in each if n > 1 else ():
        n_bytes = n * n_numbers * dtype.itemsize
        yield Collective(kind="all_gather", axis="dp", what=what, payload_bytes=n_bytes, calls=calls)


def metrics_of_completions(plan: Plan) -> Iterator[Collective]:
    """The numbers of a micro-batch that TRL's GRPOTrainer adds up or gathers over all ranks.

    Neglects: the bytes of their sums.
    Source: trl.trainer.grpo_trainer (`GRPOTrainer._compute_loss`), 1.16.
    """
    if (n := plan.world_size) > 1:
        calls = 5 if torch_options(plan).ref_model else 4
        yield Collective(
            kind="all_reduce", axis="dp", what="metrics", payload_bytes=2 * FP32.itemsize, calls=calls
        )
        n_bytes = n * plan.micro_batch * FP32.itemsize
        yield Collective(kind="all_gather", axis="dp", what="clipped tokens", payload_bytes=n_bytes, calls=2)


def metrics_of_generation(plan: Plan) -> Iterator[Collective]:
    """The numbers of a step's completions that TRL's GRPOTrainer gathers from all ranks.

    Assumes: one reward function.
    Neglects: the texts of prompts and completions, which are gathered too.
    Source: trl.trainer.grpo_trainer (`GRPOTrainer._generate`, `GRPOTrainer._generate_and_score_completions`),
    1.16.
    """
    n, each = plan.world_size, plan.micro_batch * plan.n_micro_batches
    numbers = (
        ("lengths", 2, INT64, each), ("truncated", 1, BOOL, each), (N_TOKENS, 1, INT64, 1),
        ("rewards", 1, FP32, each), ("importance sampling", 5, FP32, 1),
    )  # fmt: skip
    for what, calls, dtype, n_numbers in numbers if n > 1 else ():
        n_bytes = n * n_numbers * dtype.itemsize
        yield Collective(kind="all_gather", axis="dp", what=what, payload_bytes=n_bytes, calls=calls)


def gathered_for_server(kept: KeptByTrainer) -> Iterator[Event]:
    """The all-gather of each weight, one after the other, which every rank takes part in.

    Adapters are merged into all weights before, and taken out of them after.

    Assumes: as many bytes on each rank, which pads a smaller part.
    Neglects: that copy.
    Source: trl.generation.vllm_generation (`VLLMGeneration.sync_weights`), 1.16.
    """
    for one in kept.adapted:
        yield from merged(one)
    for before, whole in pairwise((None, *kept.for_server)):
        if whole is not None:
            sent = Collective(kind="all_gather", axis="dp", what=FOR_SERVER, payload_bytes=whole.n_bytes)
            yield from (Alloc(whole), sent, *([] if before is None else frees(before)))
    yield from frees(*kept.for_server[-1:])
    for one in kept.adapted:
        yield from unmerged(one)


METRICS: Final[Mapping[str, Callable[[Plan], Iterator[Collective]]]] = {
    "sft": metrics_of_tokens,
    "dpo": metrics_of_pairs,
    "grpo": metrics_of_completions,
}
"""The metrics that each of TRL's trainers gathers from all ranks, after a micro-batch."""


def fetched(kept: KeptByTrainer | None, plan: Plan) -> Iterator[Stretch]:
    """A step's micro-batches, which take the place of those before."""
    if kept is not None:
        n = plan.world_size
        counted = Collective(kind="all_gather", axis="dp", what=N_TOKENS, payload_bytes=n * INT64.itemsize)
        gathers = [counted] * (n > 1 and counts_tokens(plan))
        if torch_options(plan).trainer == "grpo":
            gathers = list(metrics_of_generation(plan))
        if kept.for_server or kept.adapted:
            yield events("weights for the server", gathered_for_server(kept))
        yield events("batch", [*allocs(*kept.batch), *gathers, *frees(*kept.batch)])
