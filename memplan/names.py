"""Names as people type them, and the names of a table that they stand for."""

import re
from typing import Final


def words(name: str) -> tuple[str, ...]:
    """The letters, numbers and signs of a name in lower case; hyphens, underscores and spaces are left out.

    >>> words("Llama3.1-8B") == words("llama-3.1-8b") == ("llama", "3.1", "8", "b")
    True
    >>> words("gemma-29b") == words("gemma-2-9b")
    False
    """
    return tuple(re.findall(r"[a-z]+|[0-9]+(?:\.[0-9]+)*|[^\sa-z0-9_.-]", name.lower()))


def read_as(said: str, name: str) -> tuple[str, ...]:
    """A sentence that a name was read as another one; none if they differ in case and outer spaces only.

    >>> read_as("8xh100", "8xh100-sxm"), read_as("GPT2", "gpt2")
    (('8xh100 is read as 8xh100-sxm.',), ())
    """
    said = said.strip()
    return () if said.lower() == name.lower() else (f"{said} is read as {name}.",)


OPTIONS: Final = {
    "cluster='8xh100-sxm'": (
        "gpus gpu n_gpus num_gpus world_size nproc nproc_per_node nnodes num_nodes nodes num_processes"
    ),
    "micro_batch": (
        "batch_size batch bs mbs micro_batch_size local_batch_size per_device_train_batch_size "
        "train_micro_batch_size_per_gpu"
    ),
    "global_batch": (
        "gbs global_batch_size train_batch_size gradient_accumulation gradient_accumulation_steps grad_accum "
        "accumulate_grad_batches"
    ),
    "seq_len": (
        "seqlen seq_length sequence_length max_seq_len max_seq_length max_length context context_length "
        "cutoff_len block_size"
    ),
    "precision": "dtype torch_dtype mixed_precision amp autocast",
    "precision='bf16-mixed'": "bf16 bfloat16",
    "precision='fp16-mixed'": "fp16 float16",
    "optimizer": "optim opt",
    "zero": "zero_stage stage sharding sharding_strategy",
    "zero=3": "fsdp fsdp2 full_shard fully_shard zero3",
    "zero=0": "ddp",
    "dp": "data_parallel data_parallel_size dp_size dp_shard fsdp_size",
    "dp_replicate": "hsdp replicas dp_replicate_size data_parallel_replicate_degree",
    "tp": "tensor_parallel tensor_parallel_size tensor_parallel_degree tensor_model_parallel_size tp_size",
    "pp": (
        "pipeline_parallel pipeline_parallel_size pipeline_parallel_degree pp_size "
        "pipeline_model_parallel_size"
    ),
    "ep": "expert_parallel expert_parallel_size expert_parallel_degree expert_model_parallel_size ep_size",
    "etp": "expert_tensor_parallel expert_tensor_parallel_size expert_tensor_parallel_degree",
    "cp": ("context_parallel context_parallel_size context_parallel_degree cp_size cp_degree ring_attention"),
    "cp_rotate_method": "cp_comm_strategy context_parallel_rotate_method",
    "sequence_parallel": "sp",
    "schedule": "pipeline_schedule pipeline_parallel_schedule",
    "virtual_stages": "vpp vp virtual_pipeline_parallel_size",
    "recompute='full'": (
        "ac checkpointing gradient_checkpointing activation_checkpointing activation_checkpoint "
        "recompute_activations"
    ),
    "offload": "cpu_offload offload_params",
    "quantize": "quantization",
    "quantize='nf4'": "load_in_4bit qlora",
    "quantize='int8'": "load_in_8bit",
    "clip_grad_norm": "max_grad_norm clip_grad gradient_clipping gradient_clip_val",
    "torch_version": "torch pytorch",
    "alloc_conf": "pytorch_cuda_alloc_conf expandable_segments",
}
"""Keywords of a plan, some with a value, and the names that they have in launchers and frameworks."""


def option_of(said: str) -> str | None:
    """The keyword of a plan that another framework's name asks for, with its value if it has one; or None.

    >>> option_of("per-device-train-batch-size"), option_of("gradient_checkpointing"), option_of("tq")
    ('micro_batch', "recompute='full'", None)
    """
    named = (option for option, names in OPTIONS.items() if words(said) in map(words, names.split()))
    return next(named, None)
