"""What people ask for by name and memplan does not model yet: one table, read by errors and documentation.

A row is known by the keywords (flags) that ask for it, and by values of a plan's fields. What becomes
modelled is taken out of the table; nothing else refers to a row.
"""

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from memplan.names import words


class NotModelled(NamedTuple):
    """One thing that is not modelled.

    Attributes:
        what: its name, for people.
        change: what it would change; the sentence goes on from "it".
        meanwhile: what to use until then; the sentence goes on from "meanwhile".
        keywords: keywords of `estimate`, and flags, that ask for it, between spaces.
        values: names that ask for it, by the plan's field that they are values of.
    """

    what: str
    change: str
    meanwhile: str
    keywords: str = ""
    values: Mapping[str, str] = {}


ROWS: Final = (
    NotModelled(
        "sequence parallelism by all-to-all (Ulysses) without DeepSpeed",
        "would divide each sequence over ranks, and heads within attention, by all-to-alls before and after",
        "use cp, which engine='deepspeed' plays as Ulysses and engine='torch' as ring attention",
        keywords="ulysses ulysses_size sp_size ulysses_sequence_parallel_size",
    ),
    NotModelled(
        "torch.compile of a whole model",
        "would keep fewer activations, of the ends and the loss too",
        "use compile='block', which compiles each block on its own",
        keywords="torch_compile compile_model",
        values={"compile": "model whole loss"},
    ),
    NotModelled(
        "CUDA graphs",
        "would keep the memory of a captured step in a pool of its own",
        "plan without them, and leave more free (margin)",
        keywords="cuda_graph cuda_graphs cudagraphs",
    ),
    NotModelled(
        "asynchronous tensor parallelism",
        "would cut gathers and reductions in pieces beside the products, in symmetric memory",
        "use tp without it, which is slower and sends as much, or engine='megatron' with tp_comm_overlap",
        keywords="async_tp async_tensor_parallel",
    ),
    NotModelled(
        "preference and reward training other than DPO and GRPO",
        "would hold other models beside the trained one, or learn from single sequences",
        "use trainer='dpo', or trainer='grpo' with ref_model=True",
        keywords="sync_ref_model reward_model kto orpo rloo ppo",
        values={"trainer": "trl-kto kto trl-reward reward trl-rloo rloo"},
    ),
    NotModelled(
        "completions of GRPO that are generated on the GPUs that train",
        "would hold a cache of keys and values there, by vLLM's colocate mode vllm_gpu_memory_utilization of "
        "the GPU",
        "use trainer='grpo', whose completions come from a server of vLLM on other GPUs",
        keywords="use_vllm vllm_mode vllm_gpu_memory_utilization use_transformers_continuous_batching",
    ),
    NotModelled(
        "completions of GRPO for more or less than one step",
        "would hold completions of several steps, or generate them in each micro-batch",
        "use trainer='grpo', which has those of one step",
        keywords="steps_per_generation num_iterations generation_batch_size",
    ),
    NotModelled(
        "losses of GRPO other than DAPO's, and bonuses",
        "would hold other numbers of each token than the default does",
        "use trainer='grpo', whose loss_type is 'dapo'",
        keywords="loss_type importance_sampling_level entropy_coef top_entropy_quantile",
    ),
    NotModelled(
        "a scale of what adapters give",
        "would change values and no byte",
        "leave it out",
        keywords="lora_alpha use_rslora rslora",
    ),
    NotModelled(
        "a frozen weight in 4 or 8 bits by other rules than bitsandbytes' nf4 and int8",
        "would be held in a quarter or a half of 16 bits, with scales of its own",
        "use quantize='nf4' or 'int8' with lora_rank, or weights in bfloat16, which hold more",
        values={
            "precision": "int8 int4 nf4 8bit 4bit",
            "quantize": "fp4 gptq awq hqq",
        },
    ),
    NotModelled(
        "a frozen weight in MXFP4",
        "would be held in 4 bits with a scale for each 32, which transformers does not train but makes "
        "bfloat16 of (Mxfp4Config(dequantize=True))",
        "leave it out with lora_rank, which plans frozen weights in bfloat16",
        values={"quantize": "mxfp4"},
    ),
    NotModelled(
        "offloading of what blocks save that are not recomputed",
        "would copy all that backward needs to the host and back, weights too",
        "use activation_offloading with recompute='full'",
        keywords=(
            "offload_activations activation_offload enable_activation_offloading cpu_offload_activations"
        ),
        values={"activation_offloading": "true all"},
    ),
    NotModelled(
        "offloading of the optimizer state alone",
        "would leave weights and gradients on the GPU",
        "use engine='deepspeed', whose offload_optimizer='cpu' does, optimizer='adamw-offload-torchao', or "
        "offload with zero=2 or 3",
        keywords="offload_optimizer optimizer_offload optimizer_cpu_offload",
    ),
    NotModelled(
        "products in 8 or 4 bits as a precision",
        "would make small copies of weights and inputs for each product, and take less time",
        "use float8='tensorwise' beside bf16-mixed for torchao's products in float8 (engine torch), "
        "fp8_format='hybrid' for Transformer Engine's (engine megatron), or bf16-mixed: weights, gradients "
        "and optimizer state are as large there",
        keywords="fp8 mxfp8 nvfp4",
        values={
            "precision": (
                "fp8 fp8-mixed fp8-hybrid fp8-e4m3 fp8-delayed float8 mxfp8 transformer-engine nvfp4 mxfp4 "
                "fp4"
            ),
        },
    ),
    NotModelled(
        "TF32",
        "would change the time of products and no byte",
        "use fp32 for the bytes",
        keywords="tf32 allow_tf32",
        values={
            "precision": "tf32",
        },
    ),
    NotModelled(
        "float16 weights without a copy in float32",
        "would halve weights, gradients and optimizer state",
        "use bf16, whose bytes are equal, or fp16-mixed",
        values={
            "precision": "fp16 float16 half fp16-true 16-true",
        },
    ),
    NotModelled(
        "an optimizer in 8 bits",
        "would keep each moment in one byte a weight and a scale for each block of weights",
        "use adamw-8bit, whose state is as large, or adamw-8bit-torchao or adamw-4bit-torchao",
        values={
            "optimizer": "adam8bit adam-bnb-8bit paged-adam-8bit ademamix-8bit sgd-8bit adam4bit adamfp8",
        },
    ),
    NotModelled(
        "paged optimizer state",
        "would be moved between GPU and host by CUDA, a page at a time",
        "use paged-adamw-32bit, which pages as much",
        values={
            "optimizer": "paged-adam paged-adam-32bit",
        },
    ),
    NotModelled(
        "a factored second moment with a factored confidence",
        "would keep a first moment, and two rows and two columns for each matrix",
        "use adamw, which holds more",
        values={
            "optimizer": "came",
        },
    ),
    NotModelled(
        "an optimizer of one moment other than sgd-momentum",
        "keeps as much between steps, but other temporaries in a step",
        "use lion-32bit for bitsandbytes' Lion, else sgd-momentum for the states",
        values={
            "optimizer": "lion lars signum tiger",
        },
    ),
    NotModelled(
        "an optimizer of two moments other than Adam's",
        "keeps as much between steps, but other temporaries in a step",
        "use adamw for the states",
        values={
            "optimizer": (
                "adadelta lamb sophia sophiag adabelief adan adamw-schedulefree "
                "schedule-free-adamw schedulefree adam-schedulefree stableadamw"
            ),
        },
    ),
    NotModelled(
        "a Muon other than PyTorch's",
        "would keep as much of each matrix, but compute and send other things in a step",
        "use muon, which is torch.optim.Muon of the blocks' matrices, and AdamW for the rest",
        values={
            "optimizer": "muonclip moonlight dion normuon",
        },
    ),
    NotModelled(
        "preconditioners of matrices",
        "would keep squares of each matrix's rows and columns beside its moments",
        "use adamw for the least",
        values={
            "optimizer": "shampoo distributed-shampoo soap kfac k-fac psgd",
        },
    ),
    NotModelled(
        "an optimizer of few or projected moments",
        "would keep moments for fewer numbers than there are weights",
        "use adamw, which holds more",
        values={
            "optimizer": (
                "galore galore-adamw apollo apollo-mini fira lomo adalomo adam-mini badam galore-adamw-8bit "
                "grokadamw q-galore"
            ),
        },
    ),
    NotModelled(
        "kernels of Unsloth, and Liger's norms, rotary positions and gated activations",
        "would keep fewer activations within blocks",
        "use liger_kernel='fused_linear_cross_entropy', Liger's loss, which makes logits in chunks",
        keywords="liger use_liger_kernel unsloth",
        values={"engine": "unsloth liger", "liger_kernel": "true all rope rms_norm swiglu"},
    ),
    NotModelled(
        "another framework",
        "plans memory ahead of the run by rules of its own",
        "use engine='textbook' for the states, which are as large",
        values={
            "engine": "jax xla maxtext tensorflow mlx paddle mindspore",
        },
    ),
)
"""What is not modelled yet."""

WRAPPERS: Final = {
    "ddp": "zero=0 and dp of 2 or more",
    "fsdp1": "fsdp_version=1 and zero=2 or 3",
    **dict.fromkeys(("fsdp", "fsdp2"), "zero=2 or 3, with fsdp_version=1 for FullyShardedDataParallel"),
}
"""PyTorch's wrappers, which are asked for as engines, and how a plan says them."""

KEYWORDS: Final = "of a plan"
"""The end of the words for a plan's fields and options in errors about unknown ones."""


def not_modelled(what: str, name: str) -> str | None:
    """A sentence on a name that is not modelled, or not where it was said; None: no such name.

    `what`: the words for the name's kind in an error: a plan's field, or "option of a plan".

    >>> print(not_modelled("option of a plan", "cudagraphs"))  # doctest: +NORMALIZE_WHITESPACE
    cudagraphs is not modelled yet: CUDA graphs would keep the memory of a captured step in a pool of its own;
    meanwhile plan without them, and leave more free (margin).
    >>> print(not_modelled("optimizer", "Adam_8bit").partition(":")[0])
    optimizer='Adam_8bit' is not modelled yet
    """
    field = "" if what.endswith(KEYWORDS) else what.partition(" ")[0]
    if field == "engine" and (said := WRAPPERS.get(name.lower())):
        return f"engine={name!r} is a wrapper of engine='torch', not an engine; use {said}."
    for row in ROWS:
        names = row.values.get(field, "") if field else row.keywords
        if words(name) in map(words, names.split()):
            asked = f"{field}={name!r}" if field else name
            return f"{asked} is not modelled yet: {row.what} {row.change}; meanwhile {row.meanwhile}."
    return None


def not_modelled_list() -> Iterator[str]:
    """What is not modelled yet as lines of Markdown, each with the names that it is known by.

    >>> print(next(not_modelled_list()))  # doctest: +NORMALIZE_WHITESPACE, +ELLIPSIS
    - **Sequence parallelism by all-to-all (Ulysses) without DeepSpeed** (`--ulysses`, ...) would divide ...
    """
    for row in ROWS:
        names = [f"--{name.replace('_', '-')}" for name in row.keywords.split()]
        names += [f"--{field} {name}" for field, values in row.values.items() for name in values.split()]
        known = ", ".join(f"`{name}`" for name in names)
        yield f"- **{row.what[0].upper()}{row.what[1:]}** ({known}) {row.change}; meanwhile {row.meanwhile}."
