"""The torch engine's own options: arguments of PyTorch's classes that other frameworks may lack."""

from dataclasses import dataclass
from typing import Final, final

from memplan.allocator import ALLOC_CONF
from memplan.fields import Choice, Count, Flag, described
from memplan.models.recording import ROTATES, ByTrainer, Compiles, Reference, Scoring
from memplan.plan import Plan
from memplan.shapes import DType

FSDP_UNITS: Final = ("block", "block+ends", "model")
BACKWARD_PREFETCHES: Final = ("pre", "post", "none")
OPTIMIZER_IMPLS: Final = ("default", "for-loop", "foreach", "fused")
COMPILES: Final = ("none", "block")
FLOAT8: Final = ("none", "tensorwise", "rowwise", "rowwise_with_gw_hp")
FLOAT8_ALL_GATHERS: Final = ("none", "dynamic", "precomputed")
ACTIVATION_OFFLOADING: Final = ("none", "save_on_cpu", "OffloadActivations")
LIGER_KERNELS: Final = ("none", "fused_linear_cross_entropy")
CHUNKED_LOSSES: Final = ("CEWithChunkedOutputLoss", "ChunkedLossWrapper")
DDP_COMM_HOOKS: Final = ("none", "fp16", "bf16", "powersgd")
FSDP1_OPTIONS: Final = ("use_orig_params", "backward_prefetch", "forward_prefetch")
"""The options of FullyShardedDataParallel alone."""
OF_TRAINERS: Final = {
    "dpo": ("precompute_ref_log_probs",),
    "grpo": ("max_completion_length", "ref_model"),
}
"""The options of one trainer alone."""
OF_TRL: Final = ("sft", "dpo", "grpo")
TRAINERS: Final = ("none", "huggingface", *OF_TRL)
TORCH_VERSIONS: Final = ("2.11", "2.12", "2.13", "2.14", "2.15")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TorchOptions:
    """The torch engine's own options."""

    fsdp_units: str = described(
        "block",
        Choice(
            "What FSDP2 gathers together: each block, the ends too, or the whole model",
            choices=FSDP_UNITS,
            word="units",
        ),
    )
    fsdp_blocks: int = described(1, Count("Blocks in a row that share a unit", word="blocks"))
    fsdp_version: int = described(
        2, Count("1: FullyShardedDataParallel; 2: fully_shard", most=2, word="fsdp")
    )
    use_orig_params: bool = described(
        False, Flag("FSDP1's optimizer has the module's parameters, not flat ones", word="orig")
    )
    backward_prefetch: str = described(
        "pre",
        Choice(
            "FSDP1 gathers the next unit of a backward pass before the current unit's gradients are "
            "computed, after that, or when the unit is reached",
            choices=BACKWARD_PREFETCHES,
            word="prefetch",
        ),
    )
    forward_prefetch: bool = described(
        False, Flag("FSDP1 gathers the next unit of a forward pass ahead", word="forward-prefetch")
    )
    no_sync: bool = described(
        False, Flag("FSDP accumulates whole gradients up to the last micro-batch", word="no-sync")
    )
    cp_rotate_method: str = described(
        "allgather",
        Choice(
            "How context_parallel hands keys and values around: gathered once, or sent on in each turn",
            choices=ROTATES,
            word="rotate",
        ),
    )
    compile: str = described(
        "none",
        Choice(
            "torch.compile: each block on its own, as torchtitan does, or nothing",
            choices=COMPILES,
            word="compile",
        ),
    )
    float8: str = described(
        "none",
        Choice(
            "Products of linears but the head's in float8, by torchao's recipe of this name, as torchtitan's "
            "quantize.linear.float8",
            choices=FLOAT8,
            word="float8",
        ),
    )
    float8_all_gather: str = described(
        "none",
        Choice(
            "FSDP2 gathers the weights of linears in float8 (torchao's enable_fsdp_float8_all_gather), with "
            "scales made before each all-gather, or after each optimizer step "
            "(precompute_float8_dynamic_scale_for_fsdp)",
            choices=FLOAT8_ALL_GATHERS,
            word="float8-gather",
        ),
    )
    liger_kernel: str = described(
        "none",
        Choice(
            "Liger's kernel in transformers' model, as the Trainer's liger_kernel_config has it: the output "
            "layer within the loss, whose logits are made in chunks",
            choices=LIGER_KERNELS,
            word="liger",
        ),
    )
    chunked_loss: str = described(
        "CEWithChunkedOutputLoss",
        Choice(
            "Whose loss has loss_chunks pieces: torchtune's, of logits, or torchtitan's, which pass through "
            "the output layer and back",
            choices=CHUNKED_LOSSES,
            word="loss",
        ),
    )
    activation_offloading: str = described(
        "none",
        Choice(
            "Keep what recomputed blocks keep, their inputs, in the host's page-locked memory: "
            "torch.autograd.graph.save_on_cpu around each, as PyTorch's offload_wrapper, or TRL's "
            "OffloadActivations around the model, which copies beside the computation",
            choices=ACTIVATION_OFFLOADING,
            word="activations",
        ),
    )
    optimizer_impl: str = described(
        "default",
        Choice(
            "One parameter at a time, all at once, one kernel, or torch's choice of these",
            choices=OPTIMIZER_IMPLS,
            word="impl",
        ),
    )
    optimizer_in_backward: bool = described(
        False,
        Flag(
            "Each weight has an optimizer of its own, which steps once its gradient is there, and frees it",
            word="in-backward",
        ),
    )
    offload_gradients: bool = described(
        False,
        Flag(
            "torchao's optimizer on the host frees a gradient on the GPU once it is copied",
            word="offload-gradients",
        ),
    )
    set_to_none: bool = described(
        True, Flag("Free the gradients after a step rather than zero them", word="set-to-none")
    )
    gradient_as_bucket_view: bool = described(
        False, Flag("DDP's gradients are views of its buckets", word="bucket-view")
    )
    static_graph: bool = described(
        False, Flag("DDP may rely on the same graph in each step", word="static-graph")
    )
    bucket_cap_bytes: int | None = described(
        None,
        Count("Bytes of DDP's buckets", left_out="25 MiB, the first one 1 MiB", optional=True, word="bucket"),
    )
    ddp_comm_hook: str = described(
        "none", Choice("DDP's compression of gradients", choices=DDP_COMM_HOOKS, word="hook")
    )
    trainer: str = described(
        "none",
        Choice(
            "Whose loop trains: a plain one, transformers' Trainer, or TRL's SFTTrainer, DPOTrainer or "
            "GRPOTrainer",
            choices=TRAINERS,
            word="trainer",
        ),
    )
    max_completion_length: int | None = described(
        None,
        Count(
            "Tokens that GRPOTrainer has generated, the last ones of each sequence",
            left_out="none are",
            optional=True,
            word="completion",
        ),
    )
    precompute_ref_log_probs: bool = described(
        False,
        Flag("DPOTrainer computes the reference's log-probabilities before training", word="ref-ahead"),
    )
    ref_model: bool = described(
        False,
        Flag("GRPOTrainer has a reference model, as its beta is above 0", word="ref-model"),
    )
    torch_version: str = described(
        "2.13", Choice("Release of PyTorch whose rules apply", choices=TORCH_VERSIONS, word="torch")
    )

    alloc_conf: str = described("", ALLOC_CONF)

    @property
    def release(self) -> tuple[int, int]:
        """PyTorch's release as numbers, which compare as releases do."""
        major, _, minor = self.torch_version.partition(".")
        return int(major), int(minor)


def torch_options(plan: Plan) -> TorchOptions:
    """The options of a plan of the torch engine."""
    return plan.options or TorchOptions()


def compiled_blocks(plan: Plan) -> Compiles | None:
    """How the plan's blocks are compiled; None: they are not."""
    if torch_options(plan).compile == "none":
        return None
    again = (plan.recompute,) if plan.recompute_blocks is None else ("none", plan.recompute)
    return Compiles(plan.micro_batch, plan.seq_len, tuple(dict.fromkeys(again)))


def finds_unused(plan: Plan) -> bool:
    """Whether DDP has `find_unused_parameters`: the Trainer's, but for models whose blocks are recomputed.

    What PEFT wraps is no such model.

    Source: transformers.trainer (`Trainer._build_accelerator_args`).
    """
    recomputed = plan.recompute != "none" and plan.adapters is None
    return torch_options(plan).trainer != "none" and plan.ddp and not recomputed


def gathers_head(plan: Plan) -> bool:
    """Whether TRL's trainer itself gathers the output layer's weight, whose unit of FSDP2 is not called.

    Under PEFT that is a unit alone; else it is the last norm's too, which is called.

    Source: trl.trainer.utils (`add_fused_lm_head`), 1.16.
    """
    return torch_options(plan).trainer in OF_TRL and plan.fsdp and plan.adapters is not None


def runs_again(plan: Plan) -> bool:
    """Whether TRL's trainer runs what FSDP2 shards in other passes too than the one that trains it.

    GRPOTrainer scores completions with it, and with its adapters off it is the reference.
    """
    options = torch_options(plan)
    refers = options.trainer == "dpo" and not options.precompute_ref_log_probs and plan.adapters is not None
    return plan.fsdp and (options.trainer == "grpo" or refers)


def merges_adapters(plan: Plan) -> bool:
    """Whether TRL's trainer merges adapters into their weights for vLLM's server, as there is a rule for."""
    asked = plan.adapters
    plain = asked is not None and not asked.dora and asked.quantize == "none"
    return torch_options(plan).trainer == "grpo" and plain


def called_by_trainer(plan: Plan) -> ByTrainer | None:
    """How the plan's trainer calls the module; None: as a plain loop does."""
    options, scoring = torch_options(plan), None
    if options.trainer == "none":
        return None
    if options.trainer in OF_TRL:
        scoring = Scoring(plan.micro_batch, plan.seq_len, gathers_head(plan))
    copied: Reference = "sharded copy" if plan.fsdp else "copy"
    reference: Reference = copied if plan.adapters is None else "adapters off"
    if options.precompute_ref_log_probs:
        reference = "ahead"
    return ByTrainer(
        clones_outputs=finds_unused(plan),
        casts_inputs=plan.fsdp and plan.mixed,
        scoring=scoring,
        reference=reference if options.trainer == "dpo" or options.ref_model else None,
        completion=options.max_completion_length,
        hooks_again=True if runs_again(plan) else None,
        wraps_blocks=True if plan.fsdp and plan.recompute != "none" and plan.adapters is not None else None,
    )


def weight_dtype(plan: Plan) -> DType:
    """The type of the weights that operations see: FSDP2 hands them weights as it gathers them."""
    return plan.formats.gather if plan.fsdp else plan.formats.stored
