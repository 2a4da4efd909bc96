"""The keywords of a search, so that a type checker knows them."""

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, TypedDict

from memplan.hardware import ClusterChanges
from memplan.optimizers import Optimizer
from memplan.plan import Recompute
from memplan.time.step import TimeModel

Objective = Literal["speed", "memory", "micro_batch", "front", "gpus", "seq_len"]

Progress = Callable[[int], None]
"""Told now and then how many plans have been seen."""


class PlanOptions(TypedDict, total=False):
    """Keywords of a plan, and of the options of memplan's own engines: one value or several."""

    dp: int | Iterable[int]
    dp_replicate: int | Iterable[int]
    tp: int | Iterable[int]
    pp: int | Iterable[int]
    cp: int | Iterable[int]
    ep: int | Iterable[int]
    etp: int
    virtual_stages: int | Iterable[int]
    zero: int | Iterable[int]
    sequence_parallel: bool | Iterable[bool]
    micro_batch: int | Iterable[int]
    recompute: Recompute | Iterable[Recompute]
    recompute_blocks: int | Iterable[int | None] | None
    schedule: str | Iterable[str]
    offload: bool | Iterable[bool]
    precision: str | Iterable[str]
    optimizer: Optimizer | Iterable[Optimizer]
    layers_per_stage: Sequence[int] | None
    clip_grad_norm: float | Iterable[float | None] | None
    loss_chunks: int | Iterable[int]
    lora_rank: int | Iterable[int | None] | None
    lora_targets: str
    lora_dropout: float | Iterable[float | None] | None
    use_dora: bool | Iterable[bool]
    modules_to_save: str
    quantize: str | Iterable[str]
    engine: str | Iterable[str]
    fsdp_units: str | Iterable[str]
    compile: str | Iterable[str]
    float8: str | Iterable[str]
    float8_all_gather: str | Iterable[str]
    liger_kernel: str | Iterable[str]
    chunked_loss: str | Iterable[str]
    activation_offloading: str | Iterable[str]
    fsdp_blocks: int | Iterable[int]
    fsdp_version: int | Iterable[int]
    use_orig_params: bool | Iterable[bool]
    backward_prefetch: str | Iterable[str]
    forward_prefetch: bool | Iterable[bool]
    no_sync: bool | Iterable[bool]
    cp_rotate_method: str | Iterable[str]
    optimizer_impl: str | Iterable[str]
    optimizer_in_backward: bool | Iterable[bool]
    offload_gradients: bool | Iterable[bool]
    set_to_none: bool | Iterable[bool]
    gradient_as_bucket_view: bool | Iterable[bool]
    static_graph: bool | Iterable[bool]
    bucket_cap_bytes: int | Iterable[int | None] | None
    ddp_comm_hook: str | Iterable[str]
    trainer: str | Iterable[str]
    max_completion_length: int | Iterable[int]
    precompute_ref_log_probs: bool | Iterable[bool]
    ref_model: bool | Iterable[bool]
    torch_version: str | Iterable[str]
    overlap_comm: bool | Iterable[bool | None] | None
    reduce_bucket_size: int | Iterable[int]
    stage3_prefetch_bucket_size: int | Iterable[int]
    stage3_param_persistence_threshold: int | Iterable[int]
    stage3_max_live_parameters: int | Iterable[int]
    stage3_max_reuse_distance: int | Iterable[int]
    sub_group_size: int | Iterable[int]
    zero_hpz_partition_size: int | Iterable[int]
    offload_optimizer: str | Iterable[str]
    offload_param: str | Iterable[str]
    partition_method: str | Iterable[str]
    activation_checkpoint_interval: int | Iterable[int]
    reduce_buffer_size: int | Iterable[int]
    overlap_communication: bool | Iterable[bool]
    communication_dtype: str | Iterable[str]
    alloc_conf: str
    transformer_impl: str | Iterable[str]
    attention_backend: str | Iterable[str]
    cp_comm_type: str | Iterable[str]
    hierarchical_context_parallel_sizes: tuple[int, ...] | None
    moe_token_dispatcher_type: str | Iterable[str]
    moe_grouped_gemm: bool | Iterable[bool]
    moe_permute_fusion: bool | Iterable[bool]
    moe_router_padding_for_quantization: bool | Iterable[bool]
    use_precision_aware_optimizer: bool | Iterable[bool]
    main_grads_dtype: str | Iterable[str]
    exp_avg_dtype: str | Iterable[str]
    exp_avg_sq_dtype: str | Iterable[str]
    defer_embedding_wgrad_compute: bool | Iterable[bool]
    wgrad_deferral_limit: int | Iterable[int | None] | None
    overlap_p2p_comm_warmup_flush: bool | Iterable[bool]
    recompute_modules: str
    gradient_accumulation_fusion: bool | Iterable[bool]
    masked_softmax_fusion: bool | Iterable[bool]
    attention_softmax_in_fp32: bool | Iterable[bool]
    accumulate_allreduce_grads_in_fp32: bool | Iterable[bool]
    overlap_grad_reduce: bool | Iterable[bool]
    overlap_param_gather: bool | Iterable[bool]
    overlap_param_gather_with_optimizer_step: bool | Iterable[bool]
    tp_comm_overlap: bool | Iterable[bool]
    use_layer_wise_param_layout: bool | Iterable[bool]
    microbatch_group_size_per_virtual_pipeline_stage: int | Iterable[int | None] | None
    num_distributed_optimizer_instances: int | Iterable[int]
    ddp_bucket_size: int | Iterable[int | None] | None
    cross_entropy_loss_fusion: bool | Iterable[bool]
    cross_entropy_fusion_impl: str | Iterable[str]
    megatron_deepspeed: bool | Iterable[bool]
    create_attention_mask_in_dataloader: bool | Iterable[bool]
    deterministic_mode: bool | Iterable[bool]
    make_vocab_size_divisible_by: int | Iterable[int]
    fp8_format: str | Iterable[str]
    fp8_recipe: str | Iterable[str]
    fp8_param_gather: bool | Iterable[bool]
    fp8_amax_history_len: int | Iterable[int]
    first_last_layers_bf16: bool | Iterable[bool]
    cublas_workspace_config: str
    megatron_version: str | Iterable[str]
    ngc_container: str | Iterable[str]


class SearchOptions(ClusterChanges, PlanOptions, total=False):
    """What the inverse questions pass on to `memplan.search`."""

    implementation: str | None
    seq_len: int | Iterable[int] | None
    keep: int | None
    tp_across_nodes: bool
    time_model: TimeModel | None
    progress: Progress | None
    cache: bool
