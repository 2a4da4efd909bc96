"""Plans that PyTorch refuses, fails on or computes wrongly: each rule raises with PyTorch's own reason."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import gcd
from typing import Final

from memplan.device import Device
from memplan.engines.refusals import (
    check_beside,
    check_divided,
    check_layers,
    check_positions,
    check_sequence,
)
from memplan.engines.torch.options import (
    CHUNKED_LOSSES,
    FSDP1_OPTIONS,
    OF_TRAINERS,
    OF_TRL,
    TorchOptions,
    called_by_trainer,
    compiled_blocks,
    gathers_head,
    torch_options,
    weight_dtype,
)
from memplan.errors import MissingRule, PlanRefused, divisors_text
from memplan.kernels import SCALED_MM_MULTIPLE
from memplan.models import (
    Decoder,
    Model,
    TracedModel,
    ends_are_tied,
    not_adapted,
    not_divided,
    not_divided_so,
)
from memplan.models.lookup import module_values
from memplan.models.recording import Ends, shape_at
from memplan.models.torchtitan import TorchtitanLlama
from memplan.models.traced import is_of_torchtitan
from memplan.offload_activations import MOST_STASHED
from memplan.optimizers import COMMON
from memplan.parts.weight_updates import is_fp8
from memplan.passes.recorded import checked_cut
from memplan.placements import local_shape
from memplan.plan import Plan
from memplan.shapes import BF16, FP32

USUAL: Final = TorchOptions()

DDP_OPTIONS: Final = ("gradient_as_bucket_view", "static_graph", "bucket_cap_bytes", "ddp_comm_hook")
FSDP_OPTIONS: Final = ("fsdp_units", "fsdp_blocks", "no_sync")
"""The options of FSDP alone, and of DistributedDataParallel alone."""


def _check_wrappers(model: Model, plan: Plan) -> None:
    """Raise for options of a wrapper that the plan does not use."""
    options = torch_options(plan)
    told = {name: getattr(options, name) for name in (*DDP_OPTIONS, *FSDP_OPTIONS)}
    for name, value in (told | {"offload": plan.offload}).items():
        ddp = name in DDP_OPTIONS
        if value != getattr(USUAL, name, False) and not (plan.ddp if ddp else plan.fsdp):
            wrapper = "DistributedDataParallel" if ddp else "FSDP"
            raise PlanRefused(
                f"{name}={value!r} is an option of {wrapper}, which zero={plan.zero}, dp={plan.dp} does not "
                f"use; leave it out, or use zero={'0 or 1 and dp of 2 or more' if ddp else '2 or 3'}.",
                kind="options of DDP or FSDP2 on plans that do not use it",
            )


def _check_fsdp1(model: Model, plan: Plan) -> None:
    """Raise for FSDP1's options without FSDP1, and for features that have no rule under FSDP1."""
    options = torch_options(plan)
    if not (plan.fsdp and options.fsdp_version == 1):
        for name in ("fsdp_version", *FSDP1_OPTIONS):
            value = getattr(options, name)
            if value != getattr(USUAL, name):
                way_out = (
                    "use zero=2 or 3" if name == "fsdp_version" else "use fsdp_version=1 and zero=2 or 3"
                )
                raise PlanRefused(
                    f"{name}={value!r} is of FullyShardedDataParallel (FSDP1), which zero={plan.zero}, "
                    f"fsdp_version={options.fsdp_version} does not use; leave it out, or {way_out}.",
                    kind="options of FSDP1 on plans that do not use it",
                )
        return
    if plan.offload and plan.n_micro_batches > 1 and not options.no_sync:
        raise PlanRefused(
            f"offload=True with {plan.n_micro_batches} micro-batches: FSDP1 adds no gradient to one on the "
            "host ('Gradient accumulation outside no_sync() does not work with CPU offloading', "
            f"_flat_param.py); use no_sync=True, or global_batch={plan.batch_of(1)}.",
            kind="FSDP1's offload with gradients that are accumulated outside no_sync",
        )
    frozen = isinstance(model, TracedModel) and bool(model.frozen)
    narrow = isinstance(model, TracedModel) and bool(model.narrow_dtypes)
    not_modelled = (
        (plan.tp > 1, f"tp={plan.tp}", "tp=1"),
        (plan.pp > 1, f"pp={plan.pp}", "pp=1"),
        (
            plan.offload and plan.clip_grad_norm is not None,
            "clip_grad_norm of gradients on the host",
            "offload=False, or no clipping",
        ),
        (
            plan.offload and plan.formats.loss_scaled,
            f"offload=True, precision={plan.precision!r}",
            "offload=False, or precision='bf16-mixed'",
        ),
        (options.fsdp_units == "block+ends", "fsdp_units='block+ends'", "fsdp_units='block' or 'model'"),
        (options.fsdp_blocks > 1, f"fsdp_blocks={options.fsdp_blocks}", "fsdp_blocks=1"),
        (options.release != (2, 13), f"torch_version={options.torch_version!r}", "torch_version='2.13'"),
        (
            frozen,
            "frozen weights, whose gradients FSDP1 computes beside trained ones",
            "a model that trains all",
        ),
        (narrow, "weights of several types in one flat parameter", "weights of one type"),
    )
    check_beside("fsdp_version=1", "FSDP1", "fsdp_version=2", not_modelled)


def _check_no_sync(model: Model, plan: Plan) -> None:
    """Raise for FSDP2's `no_sync` where a schedule says it, or of a release of torch without a rule."""
    options = torch_options(plan)
    if not options.no_sync or options.fsdp_version == 1:
        return
    if plan.pp > 1:
        raise PlanRefused(
            f"no_sync=True with pp={plan.pp}: a schedule sums whole gradients anyway, and reduces them once "
            "(stage.py, perform_reduce_grad); leave no_sync out.",
            kind="no_sync under a pipeline's schedule, which does the same",
        )
    if options.release >= (2, 15):
        raise MissingRule(
            f"no_sync=True with torch_version={options.torch_version!r} has no rule yet: autograd casts the "
            "gradients there; use torch_version='2.13', or no_sync=False.",
            kind="FSDP2's no_sync from torch 2.15 on",
        )


def _check_static_graph(model: Model, plan: Plan) -> None:
    if torch_options(plan).static_graph and plan.n_micro_batches > 1:
        single = f", or global_batch={plan.batch_of(1)}" if plan.pp == 1 else ""
        raise PlanRefused(
            f"static_graph=True cannot accumulate {plan.n_micro_batches} micro-batches: DDP's first backward "
            "pass must reduce (expect_autograd_hooks_ INTERNAL ASSERT FAILED, reducer.cpp); use "
            f"static_graph=False{single}.",
            kind="static_graph with gradient accumulation, which fails in PyTorch",
        )


def _untied(model: Model) -> str:
    """The model with an embedding and a head of their own, as text."""
    if isinstance(model, TracedModel):
        return "a trace of the module with untied weights"
    return "the model with tied_head=False"


def _check_units(model: Model, plan: Plan) -> None:
    options = torch_options(plan)
    if options.fsdp_blocks > 1 and options.fsdp_units == "model":
        raise PlanRefused(
            f"fsdp_blocks={options.fsdp_blocks} says how many blocks share a unit, but fsdp_units='model' "
            "makes one unit of all; use fsdp_units='block' or 'block+ends', or fsdp_blocks=1.",
            kind="fsdp_blocks although the whole model is one unit",
        )
    if ends_are_tied(model) and options.fsdp_units == "block+ends":
        raise PlanRefused(
            f"fsdp_units='block+ends' makes units of the embedding and of the head of {model.name}, but they "
            "are tied, and FSDP2 refuses a parameter 'shared with a parameter already managed by another "
            f"FSDP group'; use fsdp_units='block' or 'model', or {_untied(model)}.",
            kind="fsdp_units=block+ends of a model whose embedding and head are tied",
        )


def _check_sizes(model: Model, plan: Plan) -> None:
    """Raise if `tp` does not divide a size that the model names, or one that its operations divide."""
    sizes = dict(model.sizes_over_tp)
    others = {name: size for name, size in sizes.items() if name != "vocab_size"}
    padded = "vocab_size" in sizes and gcd(*sizes.values()) < gcd(*others.values())
    pad = f", or pad vocab_size={sizes['vocab_size']} to a multiple of tp" if padded else ""
    check_divided(plan, sizes, pad)
    if refused := not_divided(model, plan.tp):
        raise PlanRefused(refused, kind="tp does not divide the model's operations")


def _check_code(model: Model, plan: Plan) -> None:
    """Raise for a mesh axis or an option that the model's code does not support."""
    options = [axis for axis in ("pp", "tp") if axis not in model.axes]
    for name in [*options, *([] if model.chunks_loss else ["loss_chunks"])]:
        if (n := getattr(plan, name)) > 1:
            raise MissingRule(
                f"{name}={n} has no rule for {model.code}, the implementation {model.implementation!r} of "
                f"{model.name}; use {name}=1, or another implementation.",
                kind=f"{name} on code of a model that has no rule for it",
            )


def _check_ends(model: Model, plan: Plan) -> None:
    if plan.pp > 1 and ends_are_tied(model):
        raise PlanRefused(
            f"pp={plan.pp} puts the embedding and the head of {model.name} on different stages, but they are "
            f"tied; use pp=1, or {_untied(model)}.",
            kind="a pipeline of a model whose embedding and head are tied",
        )


def _check_unused(model: Model, plan: Plan) -> None:
    if plan.ddp and isinstance(model, TracedModel) and model.unused:
        first = ", ".join(model.unused[:3])
        raise PlanRefused(
            f"{len(model.unused)} parameters of {model.name} get no gradient ({first}), on which "
            "DistributedDataParallel fails in the second step ('Expected to have finished reduction "
            "in the prior iteration'); freeze them (requires_grad_(False)), use them in the loss, or use "
            "FSDP2 (zero=2 or 3).",
            kind="DDP of a module with parameters that get no gradient",
        )


def _check_stages(model: Model, plan: Plan) -> None:
    if plan.pp == 1:
        return
    stages = plan.pipeline_schedule.stages_per_rank
    if stages == 1 and plan.virtual_stages > 1:
        raise PlanRefused(
            f"schedule={plan.schedule!r} runs one stage on each rank, but virtual_stages="
            f"{plan.virtual_stages}; use schedule='interleaved-1f1b', or virtual_stages=1.",
            kind="gpipe or 1f1b with several stages on a rank",
        )
    if stages == 2 and plan.virtual_stages != 2:
        raise PlanRefused(
            f"schedule={plan.schedule!r} with virtual_stages={plan.virtual_stages}: ZBV requires exactly 2 "
            f"stages per rank, but got {plan.virtual_stages} (PyTorch); use virtual_stages=2, or "
            "schedule='zero-bubble'.",
            kind="zbv or dualpipe-v without exactly 2 stages on a rank",
        )


def _check_split_backward(model: Model, plan: Plan) -> None:
    """Raise where a schedule with split backward passes fails or loses gradients."""
    if not plan.splits_backward:
        return
    if model.blocks_return_views and plan.n_stages > 2:
        raise PlanRefused(
            f"schedule={plan.schedule!r} splits the backward passes of {plan.n_stages} stages, which fails "
            f"between the first and the last as {model.name}'s blocks return views (Can't detach views "
            "in-place); use two stages, or schedule='interleaved-1f1b'.",
            kind="zero-bubble, zbv or dualpipe-v of blocks that return views, which fails in PyTorch",
        )
    if plan.recompute == "selective":
        raise PlanRefused(
            f"schedule={plan.schedule!r} splits each backward pass, but recompute='selective' allows only "
            "one ('Trying to backward an extra time. You are only allowed to backward once on any region "
            "computed under selective activation checkpoint.'); use recompute='full' or 'none', or "
            "schedule='interleaved-1f1b'.",
            kind="zero-bubble, zbv or dualpipe-v with selective recomputation, which fails in PyTorch",
        )
    if plan.n_shards == 1 or plan.zero == 2:
        return
    why = "DDP's hooks do not run for gradients made by `torch.autograd.grad`, which are never reduced"
    if plan.zero == 3:
        why = (
            "FSDP2 frees a block's weights after its forward pass, so that `stage_backward_input` finds none "
            "to make gradients for"
        )
    raise PlanRefused(
        f"schedule={plan.schedule!r} loses gradients with zero={plan.zero}: {why}; use zero=2, or "
        "schedule='interleaved-1f1b'.",
        kind="zero-bubble, zbv or dualpipe-v with DDP, ZeRO-1 or ZeRO-3, which lose gradients",
    )


def _check_micro_batches(model: Model, plan: Plan) -> None:
    if plan.pp == 1:
        return
    m = plan.n_micro_batches
    least, reason = plan.pipeline_schedule.micro_batches(plan.pp, plan.virtual_stages, m)
    if m < least:
        raise PlanRefused(
            f"schedule={plan.schedule!r}: {reason}; use global_batch={plan.batch_of(least)}.",
            kind="too few micro-batches for the schedule, or not a multiple of its rounds",
        )


def _check_update(model: Model, plan: Plan) -> None:
    """Raise for lists of DTensors that PyTorch's optimizers or loss scalers fail on."""
    tensors_alone = plan.tp > 1 and not plan.ddp and not plan.fsdp
    options = torch_options(plan)
    listed = options.optimizer_impl in ("foreach", "fused")
    sgd = plan.optimizer in ("sgd", "sgd-momentum")
    if options.optimizer_impl == "fused" and sgd and (plan.fsdp or tensors_alone):
        raise PlanRefused(
            f"optimizer={plan.optimizer!r} with optimizer_impl='fused' fails on the DTensors of zero="
            f"{plan.zero}, tp={plan.tp} (Operator aten._fused_sgd_.default does not have a sharding strategy "
            "registered); use optimizer_impl='foreach' or 'for-loop'.",
            kind="fused SGD on sharded weights, which fails in PyTorch",
        )
    if listed and not options.set_to_none and tensors_alone:
        reason = (
            "aten.zero.default: in-place operations that require placement changes are not supported"
            if plan.sequence_parallel
            else "aten._foreach_zero_.default got mixed torch.Tensor and DTensor"
        )
        raise PlanRefused(
            f"set_to_none=False with optimizer_impl={options.optimizer_impl!r} zeroes all gradients at once, "
            f"which fails beside tp={plan.tp} ({reason}); use optimizer_impl='for-loop', or "
            "set_to_none=True.",
            kind="gradients zeroed all at once beside tensor parallelism, which fails in PyTorch",
        )
    if not plan.formats.loss_scaled:
        return
    if tensors_alone and not plan.sequence_parallel:
        raise PlanRefused(
            f"precision={plan.precision!r} unscales all gradients at once, which fails beside tp={plan.tp} "
            "(aten._amp_foreach_non_finite_check_and_unscale_.default: got mixed torch.Tensor and DTensor); "
            "use sequence_parallel=True, dp of 2 or more, or precision='bf16-mixed'.",
            kind="fp16-mixed beside tensor parallelism alone, which fails in PyTorch",
        )
    if options.optimizer_impl == "fused" and not sgd and (plan.pp > 1 or (plan.tp > 1 and not plan.fsdp)):
        raise PlanRefused(
            f"optimizer={plan.optimizer!r} with optimizer_impl='fused' fails on the overflow flag that "
            f"precision={plan.precision!r} shares over all ranks (_foreach_sub_: output with shape [] "
            "doesn't match the broadcast shape [1]); use optimizer_impl='foreach' or 'for-loop'.",
            kind="fused Adam with fp16-mixed over several ranks, which fails in PyTorch",
        )


def _check_muon(model: Model, plan: Plan) -> None:
    """Raise for what `torch.optim.Muon` refuses, and for what has no rule beside it.

    Source: `torch.optim._muon:Muon`.
    """
    if plan.kept.others is None:
        return
    if plan.fsdp and torch_options(plan).fsdp_version == 1:
        raise PlanRefused(
            f"optimizer={plan.optimizer!r} fails on FSDP1's flat parameters (Muon only supports 2D "
            "parameters whereas we found a parameter with size: ...); use adamw, or zero=0 or 1.",
            kind="Muon of flat parameters, which are no matrices",
        )
    scaled = (plan.formats.loss_scaled, f"precision={plan.precision!r}")
    own = (
        (plan.ep > 1, f"ep={plan.ep}"),
        (plan.fsdp and plan.tp > 1, f"tp={plan.tp} and zero={plan.zero}"),
        (plan.fsdp and plan.offload, "offload=True"),
        scaled,
    )
    if plan.ddp and plan.tp > 1:
        raise MissingRule(
            f"optimizer={plan.optimizer!r} with tp={plan.tp} and zero={plan.zero}, dp={plan.dp}: under DDP "
            "weights are plain tensors, and Muon would orthogonalize each rank's part as if it were the "
            "whole; use dp=1, or adamw.",
            kind="Muon of parts of matrices under DDP beside tensor parallelism",
        )
    _check_beside_optimizer(plan, "Muon", *own, divided=True)


def _check_adafactor(model: Model, plan: Plan) -> None:
    """Raise for what fails in PyTorch on weights of which a rank has a part, and for what has no rule.

    Source: `torch.optim._adafactor:Adafactor._init_group`, whose rows and columns are replicated.
    """
    if plan.kept.factored is None:
        return
    fails = (
        "in-place operations that require placement changes are not supported"
        if plan.kept.package == "torch"
        else "aten.add_.Tensor got mixed torch.Tensor and DTensor"
    )
    if (plan.fsdp and torch_options(plan).fsdp_version == 2) or (plan.tp > 1 and not plan.ddp):
        raise PlanRefused(
            f"optimizer={plan.optimizer!r} fails on the DTensors of zero={plan.zero}, tp={plan.tp} ({fails}"
            "); use adamw, or zero=0 or 1 with tp=1.",
            kind="Adafactor of DTensors, which fails in PyTorch",
        )
    if plan.fsdp:
        raise PlanRefused(
            f"optimizer={plan.optimizer!r} factors no flat parameter of fsdp_version=1, which is a vector: "
            "it would train as another optimizer does; use adamw, or zero=0 or 1.",
            kind="Adafactor of flat parameters, which are no matrices",
        )
    _check_beside_optimizer(plan, "Adafactor", impls=IMPLS if plan.kept.package == "torch" else ())


def _check_other_of_torch(model: Model, plan: Plan) -> None:
    """Raise for what has no rule beside RMSprop, Adagrad, NAdam, RAdam and Adamax."""
    if plan.kept.package == "torch" and plan.kept.others is None and plan.optimizer not in COMMON:
        flat = plan.fsdp and torch_options(plan).fsdp_version == 1
        _check_beside_optimizer(plan, plan.kept.whose, (flat, "fsdp_version=1"), impls=IMPLS)


IMPLS: Final = ("for-loop", "foreach")
"""The implementations of PyTorch's optimizers that have rules."""


def _check_bitsandbytes(model: Model, plan: Plan) -> None:
    """Raise for what has no rule beside bitsandbytes' optimizers."""
    if plan.kept.package != "bitsandbytes":
        return
    scaled = (plan.formats.loss_scaled, f"precision={plan.precision!r}")
    own = ((plan.zero > 0, f"zero={plan.zero}"), scaled)
    _check_beside_optimizer(plan, "an optimizer of bitsandbytes", *own)


def _check_torchao(model: Model, plan: Plan) -> None:
    """Raise for what fails in torchao, and for what has no rule beside its optimizers."""
    if plan.kept.package != "torchao":
        return
    if plan.fsdp and is_fp8(plan.kept) and plan.formats.stored == BF16:
        raise PlanRefused(
            f"optimizer={plan.optimizer!r} fails on DTensors in bfloat16, as precision={plan.precision!r} "
            f"with zero={plan.zero} has them (OptimStateFp8: unimplemented operator aten.view.dtype); use "
            "precision='bf16-mixed', or adamw-8bit-torchao.",
            kind="torchao's fp8 AdamW of DTensors in bfloat16, which fails in torchao",
        )
    options = torch_options(plan)
    own = [
        (plan.zero == 1, "zero=1"),
        (plan.fsdp and options.fsdp_version == 1, "fsdp_version=1"),
        (plan.offload, "offload=True"),
        (options.optimizer_in_backward, "optimizer_in_backward=True"),
        (plan.formats.loss_scaled, f"precision={plan.precision!r}"),
    ]
    if plan.kept.on_host:
        _check_offloading_optimizer(plan)
        own += [(getattr(plan, axis) > 1, f"{axis}={getattr(plan, axis)}") for axis in ("pp", "cp", "ep")]
        own += [(options.trainer != "none", f"trainer={options.trainer!r}")]
    _check_beside_optimizer(plan, "an optimizer of torchao", *own)


def _check_offloading_optimizer(plan: Plan) -> None:
    """Raise for what fails beside torchao's optimizer on the host, or trains otherwise than it seems to.

    Source: torchao/optim/cpu_offload.py (`backward_hook`, `CPUOffloadOptimizer.zero_grad`), 0.18.
    """
    options, away = torch_options(plan), torch_options(plan).offload_gradients
    asked = f"optimizer={plan.optimizer!r}"
    cannot = (
        (
            plan.ddp,
            f"{asked} with dp={plan.dp}, zero={plan.zero}: gradients are copied to the host before DDP "
            "averages them, so that each replica trains by itself; use zero=3, or dp=1.",
            "torchao's optimizer on the host under DDP, which averages gradients too late for it",
        ),
        (
            plan.clip_grad_norm is not None,
            f"{asked} with clip_grad_norm={plan.clip_grad_norm}: gradients are copied to the host in the "
            "backward pass, before they are clipped; leave clip_grad_norm out, or use adamw.",
            "torchao's optimizer on the host with clipping, which comes too late for it",
        ),
        (
            not options.set_to_none,
            f"{asked} with set_to_none=False fails in torchao (`assert set_to_none`); use set_to_none=True.",
            "torchao's optimizer on the host with gradients that are zeroed",
        ),
        (
            away and plan.fsdp,
            f"{asked} with offload_gradients=True, zero={plan.zero} fails in torchao (DTensor has no rule "
            "for aten.record_stream); use offload_gradients=False.",
            "torchao's optimizer on the host that frees gradients of DTensors, which fails in torchao",
        ),
        (
            away and plan.n_micro_batches > 1,
            f"{asked} with offload_gradients=True, {plan.n_micro_batches} micro-batches: each gradient on "
            "the host takes the place of the one before; use offload_gradients=False, or "
            f"global_batch={plan.batch_of(1)}.",
            "torchao's optimizer on the host that frees gradients which are to be accumulated",
        ),
    )
    for is_asked, text, kind in cannot:
        if is_asked:
            raise PlanRefused(text, kind=kind)


def _check_offload_gradients(model: Model, plan: Plan) -> None:
    """Raise for gradients that another optimizer than torchao's on the host would offload."""
    if torch_options(plan).offload_gradients and not plan.kept.on_host:
        raise PlanRefused(
            "offload_gradients=True is of torchao's optimizer on the host, not of optimizer="
            f"{plan.optimizer!r}; leave it out, or use optimizer='adamw-offload-torchao'.",
            kind="gradients offloaded by an optimizer that does not",
        )


def _check_beside_optimizer(
    plan: Plan, whose: str, *own: tuple[bool, str], impls: Sequence[str] = (), divided: bool = False
) -> None:
    """Raise for what has no rule beside an optimizer other than SGD and Adam.

    `own`: its further rows; `impls`: its implementations beside the default that have rules; `divided`: it
    has rules for what tensor ranks divide.
    """
    impl = torch_options(plan).optimizer_impl
    not_modelled = (
        (plan.tp > 1 and not divided, f"tp={plan.tp}"),
        *own,
        (impl not in ("default", *impls), f"optimizer_impl={impl!r}"),
    )
    for what in [what for asked, what in not_modelled if asked]:
        raise MissingRule(
            f"optimizer={plan.optimizer!r} with {what} has no rule yet; leave one of them out, or use adamw.",
            kind=f"{whose} with {what.partition('=')[0]}",
        )


def _check_data_axis(model: Model, plan: Plan) -> None:
    if plan.zero and plan.n_shards == 1:
        raise PlanRefused(
            f"zero={plan.zero} shards over data-parallel ranks, but dp=1; use dp of 2 or more, or zero=0.",
            kind="a ZeRO stage without data-parallel ranks",
        )
    if ends_are_tied(model) and plan.tp > 1 and plan.ddp:
        raise PlanRefused(
            f"zero={plan.zero} replicates {model.name}'s tied head with DDP, which fails on a weight that tp="
            f"{plan.tp} has divided (aten.cat.default got mixed torch.Tensor and DTensor); use zero=2 or 3, "
            "tp=1, or the model with tied_head=False.",
            kind="DDP beside tensor parallelism of a model whose embedding and head are tied",
        )


def _check_precision(model: Model, plan: Plan) -> None:
    """Raise for a precision that PyTorch's wrappers do not offer.

    Source: `torch.distributed.fsdp._fully_shard._fsdp_api:MixedPrecisionPolicy`,
    torch/csrc/distributed/c10d/reducer.cpp (`initialize_buckets`).
    """
    row, named = plan.formats, f"precision={plan.precision!r}"
    if plan.ddp and row.reduce != row.stored:
        raise PlanRefused(
            f"{named} reduces gradients in {row.reduce.name}, but DistributedDataParallel's buckets have the "
            f"weights' type, {row.stored.name}; use zero=2 or 3, or another precision.",
            kind="DDP with gradients reduced in another type than the weights'",
        )
    broken = ""
    if row.accumulate != row.stored:
        broken = (
            f"keeps gradients in {row.accumulate.name} beside weights in {row.stored.name}, but a "
            "gradient in PyTorch has its weight's type"
        )
    elif plan.fsdp and row.gather != row.compute:
        broken = (
            f"gathers weights in {row.gather.name} to compute in {row.compute.name}, but FSDP2 computes in "
            "what it gathers (param_dtype)"
        )
    if broken:
        raise PlanRefused(
            f"{named} {broken}; use another precision.", kind="number formats that PyTorch does not have"
        )
    if plan.fsdp and row.reduce not in (row.gather, FP32):
        raise MissingRule(
            f"{named} reduces gradients that come in {row.gather.name} in {row.reduce.name}, which has no "
            "rule yet; use a precision that reduces in float32 or as they come.",
            kind="gradients that are narrowed for their reduction, which has no rule",
        )


NOT_ADAPTED: Final = ("pp", "tp", "cp", "ep")
"""Axes that have no rule beside adapters."""

MOST_FUSED_TOKENS: Final = 1536
"""Tokens up to which a product may have a kernel that reads weights of four bits, by the GPU and its sizes.

Source: bitsandbytes/backends/cuda/ops.py (`_gemm_4bit_use_custom_cuda`), release 0.50.
"""


def _check_adapters(model: Model, plan: Plan) -> None:
    """Raise for adapters of a model that is none of transformers, or beside what has no rule with them."""
    if plan.adapters is None:
        return
    if model.config_values() is None:
        raise not_adapted(model)
    options, degrees = torch_options(plan), {axis: plan.mesh.size(axis) for axis in NOT_ADAPTED}
    n_tokens = plan.micro_batch * plan.seq_len
    not_modelled = (
        *[(n > 1, f"{axis}={n}", f"{axis}=1") for axis, n in degrees.items()],
        (plan.fsdp and options.fsdp_version == 1, "fsdp_version=1", "fsdp_version=2"),
        (plan.formats.loss_scaled, f"precision={plan.precision!r}", "precision='bf16-mixed'"),
        (
            plan.fsdp and plan.quantize != "none",
            f"zero={plan.zero} of quantized weights",
            "zero=0 or 1, or quantize='none'",
        ),
        (
            plan.quantize == "int8" and options.trainer != "none",
            f"trainer={options.trainer!r}, quantize='int8'",
            "quantize='nf4'",
        ),
        (
            plan.quantize.startswith("nf4") and n_tokens <= MOST_FUSED_TOKENS,
            f"quantize={plan.quantize!r} of {n_tokens} tokens, for which bitsandbytes has other kernels",
            f"micro_batch and seq_len of more than {MOST_FUSED_TOKENS:,} tokens, or quantize='int8'",
        ),
    )
    for asked, what, other in not_modelled:
        if asked:
            raise MissingRule(
                f"lora_rank={plan.lora_rank} with {what} has no rule yet; use {other}, or leave lora_rank "
                "out.",
                kind=f"LoRA with {what.partition('=')[0]}",
            )


NOT_COMPILED: Final = ("pp", "tp", "cp", "ep")
"""Axes that have no rule beside options that change the modules."""


def _check_compiled(model: Model, plan: Plan) -> None:
    """Raise for compiled blocks of a model without a module, or beside what has no rule with them."""
    if torch_options(plan).compile == "none":
        return
    module_values(model)
    under_autocast = (
        plan.autocasts,
        f"precision={plan.precision!r} under autocast (zero={plan.zero})",
        "precision='bf16', or zero=2 or 3, where FSDP2 casts",
    )
    order = ": the order in which DDP reduces"
    of_tp = _of_tensor_ranks(model, plan)
    _check_beside_modules(plan, "compile", "torch.compile", of_tp, under_autocast, of_ddp=order)


def _of_tensor_ranks(model: Model, plan: Plan) -> tuple[bool, str, str]:
    """The row of modules over tensor-parallel ranks, of which torchtitan's Llama alone has a rule."""
    other = plan.tp > 1 and not isinstance(model, TorchtitanLlama)
    return other, f"tp={plan.tp} of {model.code}", "tp=1, implementation='torchtitan'"


def _check_beside_modules(
    plan: Plan,
    option: str,
    kind: str,
    *own: tuple[bool, str, str],
    of_ddp: str = "",
    usual: object = "none",
) -> None:
    """Raise for what has no rule beside an option that changes the modules.

    `own`: the option's further rows, of tensor parallelism too: whether it is asked for, what, and what to
    use; `of_ddp`: what of DDP; `usual`: the option's default.
    """
    _check_beside_option(
        plan,
        option,
        kind,
        *_divided_over(plan, ("pp", "cp", "ep")),
        (torch_options(plan).fsdp_version == 1, "fsdp_version=1", "fsdp_version=2"),
        (plan.ddp, f"zero={plan.zero}, dp={plan.dp}{of_ddp}", "zero=2 or 3"),
        (plan.adapters is not None, f"lora_rank={plan.lora_rank}", "all weights"),
        *own,
        usual=usual,
    )


def _check_beside_option(
    plan: Plan, option: str, kind: str, *rows: tuple[bool, str, str], usual: object = "none"
) -> None:
    """Raise for what has no rule beside an option; a row: whether it is asked for, what, and what to use."""
    named = f"{option}={getattr(torch_options(plan), option)!r}"
    check_beside(named, kind, f"{option}={usual!r}", rows)


def _divided_over(plan: Plan, axes: Sequence[str]) -> Iterator[tuple[bool, str, str]]:
    """A row for each axis: whether the plan has several ranks along it, what, and what to use."""
    for axis in axes:
        n = plan.mesh.size(axis)
        yield n > 1, f"{axis}={n}", f"{axis}=1"


def _check_float8(model: Model, plan: Plan) -> None:
    """Raise for float8 of a model without a module, or beside what has no rule with it.

    Source: aten/src/ATen/native/cuda/ScaledBlas.cpp (`_scaled_mm_cuda`).
    """
    recipe = torch_options(plan).float8
    if recipe == "none":
        return
    module_values(model)
    n_tokens = plan.micro_batch * plan.seq_len
    if n_tokens % SCALED_MM_MULTIPLE:
        raise PlanRefused(
            f"float8={recipe!r}: micro_batch={plan.micro_batch} x seq_len={plan.seq_len} = {n_tokens} tokens "
            f"are no multiple of {SCALED_MM_MULTIPLE}, as torch._scaled_mm demands; use seq_len="
            f"{-(-plan.seq_len // SCALED_MM_MULTIPLE) * SCALED_MM_MULTIPLE}.",
            kind="float8 of tokens that are no multiple of 16",
        )
    _check_parts_in_float8(model, plan)
    _check_beside_modules(
        plan,
        "float8",
        "float8",
        _of_tensor_ranks(model, plan),
        (
            recipe != "tensorwise" and compiled_blocks(plan) is None,
            "compile='none', which was compared with no run,",
            "compile='block', or float8='tensorwise'",
        ),
        (plan.formats.compute != BF16, f"precision={plan.precision!r}", "precision='bf16-mixed' or 'bf16'"),
        (
            plan.tp > 1 and plan.autocasts,
            f"tp={plan.tp} under autocast (zero={plan.zero})",
            "precision='bf16', or zero=2 or 3, where FSDP2 casts",
        ),
    )


def _check_parts_in_float8(model: Model, plan: Plan) -> None:
    """Raise for a rank's parts of linears in float8 that its products do not take.

    Source: aten/src/ATen/native/cuda/ScaledBlas.cpp (`_scaled_mm_cuda`).
    """
    if plan.tp == 1 or not isinstance(model, TorchtitanLlama):
        return
    heads, kv_heads = model.n_heads * model.d_head, model.n_kv_heads * model.d_head
    sizes = ("d_ff", model.d_ff), ("n_heads x d_head", heads), ("n_kv_heads x d_head", kv_heads)
    for what, n in sizes:
        if n % (SCALED_MM_MULTIPLE * plan.tp):
            raise PlanRefused(
                f"float8={torch_options(plan).float8!r}: {what}={n} divided by tp={plan.tp} is no multiple "
                f"of {SCALED_MM_MULTIPLE}, as torch._scaled_mm demands; use another tp, or float8='none'.",
                kind="float8 of parts of linears that are no multiple of 16",
            )


def _check_float8_all_gather(model: Model, plan: Plan) -> None:
    """Raise for an all-gather in float8 that torchao does not make, or beside what has no rule with it.

    Source: `torchao.float8.config:Float8LinearConfig`.
    """
    options = torch_options(plan)
    if options.float8_all_gather == "none":
        return
    if options.float8 != "tensorwise":
        raise PlanRefused(
            f"float8_all_gather={options.float8_all_gather!r} with float8={options.float8!r}: torchao "
            "gathers weights in float8 with one scale for each; use float8='tensorwise', or "
            "float8_all_gather='none'.",
            kind="an all-gather in float8 without one scale for each weight",
        )
    _check_beside_option(
        plan,
        "float8_all_gather",
        "FSDP2's all-gather in float8",
        (
            not plan.fsdp or plan.n_shards == 1,
            f"zero={plan.zero}, dp={plan.dp}",
            "zero=2 or 3 with dp=2 or more",
        ),
        (plan.offload, "offload=True", "offload=False"),
        (options.trainer != "none", f"trainer={options.trainer!r}", "trainer='none'"),
        (options.optimizer_in_backward, "optimizer_in_backward=True", "optimizer_in_backward=False"),
        (options.no_sync, "no_sync=True", "no_sync=False"),
        (options.fsdp_units == "model", "fsdp_units='model'", "fsdp_units='block'"),
        (plan.optimizer not in COMMON, f"optimizer={plan.optimizer!r}", "adamw"),
    )


def _check_scalars(model: Model, plan: Plan) -> None:
    """Raise for parameters without dims, which FSDP2 does not shard.

    Source: `torch.distributed.fsdp._fully_shard._fsdp_init:_verify_managed_param`.
    """
    if not isinstance(model, TracedModel) or not plan.fsdp or torch_options(plan).fsdp_version != 2:
        return
    for one in [one for one, _ in model.parameters if not one.shape]:
        raise PlanRefused(
            f"zero={plan.zero}: FSDP2 shards no parameter without dims, as is {one.name} of {model.name}; "
            "use zero=0 or 1, or trace the module with one element in its place (memplan.trace).",
            kind="FSDP2 of a parameter without dims",
        )


def _check_even_shards(model: Model, plan: Plan) -> None:
    """Raise for weights gathered in float8 that do not divide evenly: their hook gathers no padding.

    Source: `torchao.float8.fsdp_utils:WeightWithDynamicFloat8CastTensor.fsdp_pre_all_gather`.
    """
    if not isinstance(model, TracedModel):
        return
    for one in [one for one, _ in model.parameters if one.gathered_as]:
        rows = local_shape(shape_at(one.shape, 1, 1), dict(one.placements), model.mesh)[0]
        if rows % plan.n_shards:
            raise PlanRefused(
                f"float8_all_gather={torch_options(plan).float8_all_gather!r}: the {rows} rows of {one.name} "
                f"do not divide by {plan.n_shards} ranks, and torchao gathers shards without padding; use dp "
                "that divides them, or float8_all_gather='none'.",
                kind="an all-gather in float8 of unequal shards",
            )


def _check_activation_offloading(model: Model, plan: Plan) -> None:
    """Raise for activations on the host where no block is recomputed, or beside what has no rule."""
    option, float8 = torch_options(plan).activation_offloading, torch_options(plan).float8
    if option == "none":
        return
    _check_beside_option(
        plan,
        "activation_offloading",
        "activation_offloading",
        (plan.recompute == "none", "recompute='none', which would copy weights too,", "recompute='full'"),
        *_divided_over(plan, NOT_COMPILED),
        (plan.adapters is not None, f"lora_rank={plan.lora_rank}", "all weights"),
        (compiled_blocks(plan) is not None, "compile='block'", "compile='none'"),
        (float8 != "none", f"float8={float8!r}", "float8='none'"),
        (isinstance(model, TracedModel), "a traced model", "a model of a family"),
        *(_not_by_trl(model, plan) if option == "OffloadActivations" else ()),
    )


def _check_optimizer_in_backward(model: Model, plan: Plan) -> None:
    """Raise for an optimizer in the backward pass that cannot run, or beside what has no rule with it."""
    options = torch_options(plan)
    if not options.optimizer_in_backward:
        return
    cannot = (
        (
            plan.n_micro_batches > 1,
            f"{plan.n_micro_batches} micro-batches",
            f"global_batch={plan.batch_of(1)}",
        ),
        (plan.clip_grad_norm is not None, f"clip_grad_norm={plan.clip_grad_norm}", "no clipping"),
        (plan.formats.loss_scaled, f"precision={plan.precision!r}", "precision='bf16-mixed'"),
        (not options.set_to_none, "set_to_none=False", "set_to_none=True"),
    )
    for asked, what, other in cannot:
        if asked:
            raise PlanRefused(
                f"optimizer_in_backward=True with {what}: a weight is updated as soon as it has a gradient, "
                f"so none can be accumulated, clipped or unscaled; use {other}.",
                kind="an optimizer in the backward pass beside what needs all gradients",
            )
    _check_beside_option(
        plan,
        "optimizer_in_backward",
        "an optimizer in the backward pass",
        *_divided_over(plan, NOT_COMPILED),
        (plan.ddp, f"dp={plan.dp}, zero={plan.zero}", "zero=2 or 3"),
        *_divided_over(plan, ("dp_replicate",)),
        (plan.fsdp and options.fsdp_version == 1, "fsdp_version=1", "fsdp_version=2"),
        (plan.offload, "offload=True", "offload=False"),
        (
            plan.kept.others is not None or (plan.fsdp and plan.kept.package != "torch"),
            f"optimizer={plan.optimizer!r}",
            "adamw",
        ),
        (options.trainer != "none", f"trainer={options.trainer!r}", "trainer='none'"),
        usual=False,
    )


def _check_chunked_loss(model: Model, plan: Plan) -> None:
    """Raise for torchtitan's loss of a model without a rule, or beside what has none with it.

    Source: torchtitan 0.3.0, torchtitan/components/loss.py (`ChunkedLossWrapper`).
    """
    options = torch_options(plan)
    if options.chunked_loss == CHUNKED_LOSSES[0]:
        return
    if not model.chunks_loss or ends_are_tied(model):
        raise MissingRule(
            f"chunked_loss={options.chunked_loss!r} has no rule for {model.name} of {model.code}"
            f"{', whose ends are tied' if model.chunks_loss else ''}; use implementation='torchtitan' of a "
            "model with an output layer of its own, or leave chunked_loss out.",
            kind="torchtitan's loss of a model that it has no rule for",
        )
    if plan.seq_len % plan.loss_chunks:
        raise PlanRefused(
            f"loss_chunks={plan.loss_chunks} does not divide seq_len={plan.seq_len} (ChunkedLossWrapper "
            f"sequence length must be divisible by num_chunks); use one of {divisors_text(plan.seq_len)}.",
            kind="chunks of torchtitan's loss that do not divide the sequence",
        )
    ends, release = options.fsdp_units == "block+ends" or not plan.fsdp, options.torch_version
    _check_beside_modules(
        plan,
        "chunked_loss",
        "torchtitan's chunked loss",
        *_divided_over(plan, ("tp",)),
        (plan.zero == 2, "zero=2", "zero=3"),
        (not ends, f"fsdp_units={options.fsdp_units!r}", "fsdp_units='block+ends'"),
        (
            plan.autocasts,
            f"precision={plan.precision!r} under autocast (zero={plan.zero})",
            "precision='bf16'",
        ),
        (plan.formats.loss_scaled, f"precision={plan.precision!r}", "precision='bf16-mixed'"),
        (options.no_sync, "no_sync=True", "no_sync=False"),
        (plan.offload, "offload=True", "offload=False"),
        (options.optimizer_in_backward, "optimizer_in_backward=True", "optimizer_in_backward=False"),
        (release != "2.13", f"torch_version={release!r}", "torch_version='2.13'"),
        (compiled_blocks(plan) is not None, "compile='block'", "compile='none'"),
        (options.float8 != "none", f"float8={options.float8!r}", "float8='none'"),
        of_ddp=", whose reducer takes one gradient of each weight",
        usual=CHUNKED_LOSSES[0],
    )


LIGER: Final = ("llama", "mistral", "phi3", "qwen2", "qwen3")
"""The families of transformers whose forward pass Liger replaces by one that ends in this loss alone."""


def _check_liger(model: Model, plan: Plan) -> None:
    """Raise for Liger's loss of a model without a rule, or beside what has none with it."""
    options = torch_options(plan)
    if options.liger_kernel == "none":
        return
    if not model.computes_loss or model.family not in LIGER:
        raise MissingRule(
            f"liger_kernel={options.liger_kernel!r} has no rule for {model.name} of {model.code}; use one "
            f"of {', '.join(LIGER)} with implementation='huggingface', or liger_kernel='none'.",
            kind="Liger's loss of a model that it has no rule for",
        )
    ends, offloaded = (
        options.fsdp_units == "block+ends",
        options.activation_offloading == "OffloadActivations",
    )
    _check_beside_modules(
        plan,
        "liger_kernel",
        "Liger's loss",
        *_divided_over(plan, ("tp",)),
        (
            plan.autocasts,
            f"precision={plan.precision!r} under autocast (zero={plan.zero})",
            "precision='bf16'",
        ),
        (plan.formats.loss_scaled, f"precision={plan.precision!r}", "precision='bf16-mixed'"),
        (ends, "fsdp_units='block+ends'", "fsdp_units='block'"),
        (offloaded, "activation_offloading='OffloadActivations'", "activation_offloading='save_on_cpu'"),
        (compiled_blocks(plan) is not None, "compile='block'", "compile='none'"),
        (options.float8 != "none", f"float8={options.float8!r}", "float8='none'"),
    )


def _not_by_trl(model: Model, plan: Plan) -> tuple[tuple[bool, str, str], ...]:
    """What has no rule under TRL's `OffloadActivations`, as rows of `_check_activation_offloading`."""
    return (
        (plan.recompute != "full", f"recompute={plan.recompute!r}", "recompute='full'"),
        (plan.recompute_blocks is not None, f"recompute_blocks={plan.recompute_blocks}", "all blocks"),
        (not model.computes_loss, model.code, "implementation='huggingface'"),
        (len(model.kinds) > 1, "blocks of several kinds", "a model of equal blocks"),
        (model.n_blocks <= MOST_STASHED, f"{model.n_blocks} blocks", f"more than {MOST_STASHED} blocks"),
        (torch_options(plan).fsdp_version == 1, "fsdp_version=1", "fsdp_version=2"),
    )


def _check_recordings(model: Model, plan: Plan) -> None:
    """Raise for what no recording of a module's own passes says: it is traced, or will be."""
    divided, compiles = bool(plan.mesh.dividing) and not model.divides_itself, compiled_blocks(plan)
    float8 = torch_options(plan).float8 != "none"
    if isinstance(model, TracedModel) or divided or plan.adapters is not None or compiles or float8:
        _raise_first(
            model,
            (
                (plan.splits_backward, f"schedule={plan.schedule!r}", "schedule='interleaved-1f1b'"),
                (plan.loss_chunks > 1, f"loss_chunks={plan.loss_chunks}", "loss_chunks=1"),
                (
                    plan.recompute == "selective" and not compiles,
                    "recompute='selective'",
                    "recompute='full' or 'none'",
                ),
            ),
        )


def _raise_first(model: Model, not_traced: Iterable[tuple[bool, str, str]]) -> None:
    """Raise for the first feature that the plan uses; rows are (is used, feature, alternative)."""
    for asked, what, other in not_traced:
        if asked:
            raise MissingRule(
                f"{what}: {model.name} was traced on one rank without it, and no rule says what it would "
                f"change; use {other}.",
                kind=f"{what.partition('=')[0]} of a traced model",
            )


def _check_traced(model: Model, plan: Plan) -> None:
    """Raise for plans that a trace of a module on one rank says nothing about."""
    if not isinstance(model, TracedModel):
        return
    options = torch_options(plan)
    integers, narrow = model.integer_dtypes, model.narrow_dtypes
    other_release = not model.made_with.startswith(f"torch {options.torch_version}.")
    if (mesh := plan.mesh.dividing) != model.mesh and not model.config:
        raise not_divided_so(model, mesh)
    traced_alone = (
        (plan.pp > 1 and not model.n_layers, f"pp={plan.pp}", "pp=1: it has no blocks"),
        (
            plan.recompute_blocks is not None and model.n_stacks > 1,
            f"recompute_blocks={plan.recompute_blocks}",
            "all blocks: they are in several stacks",
        ),
        (
            plan.recompute == "full" and not model.n_layers,
            "recompute='full'",
            "recompute='none': it has no blocks",
        ),
        (
            options.fsdp_units == "block+ends" and not model.n_layers,
            "fsdp_units='block+ends'",
            "fsdp_units='model': it has no blocks",
        ),
        (
            plan.fsdp and bool(integers),
            f"zero={plan.zero} of weights of {', '.join(integers)}",
            "zero=0 or 1",
        ),
        (
            plan.fsdp and bool(narrow) and plan.formats.gather == FP32,
            f"zero={plan.zero} of weights of {', '.join(narrow)} beside others in float32",
            "zero=0 or 1, or precision='bf16-mixed'",
        ),
        (other_release, f"torch_version={options.torch_version!r}", f"that of {model.made_with}"),
    )
    _raise_first(model, traced_alone)


def _check_experts(model: Model, plan: Plan) -> None:
    """Raise for expert-parallel ranks beside what transformers or PyTorch does not run with them.

    Source: transformers.distributed.configuration_utils (`DistributedConfig._validate_mesh_config`,
    `DistributedConfig._validate_resolved_ep_plan`).
    """
    if plan.ep == 1:
        return
    options, named = torch_options(plan), f"ep={plan.ep}"
    if plan.ep % plan.tp:
        raise PlanRefused(
            f"{named} is not a multiple of tp={plan.tp}, though ranks of one tensor group hold one batch; "
            f"use tp={plan.tp} times one of {divisors_text(plan.dp)}.",
            kind="ep that is no multiple of tp",
        )
    if model.divides_itself:
        raise MissingRule(
            f"{named} has no rule for {model.code}, the implementation {model.implementation!r} of "
            f"{model.name}: it has no experts that are known; use ep=1, or a mixture of experts.",
            kind="ep of a model without experts",
        )
    if plan.pp > 1 and not is_of_torchtitan(model):
        raise PlanRefused(
            f"{named} beside pp={plan.pp}: transformers refuses it ('Combining token dispatch with pipeline "
            "parallelism is not supported/tested yet.'); use implementation='torchtitan', pp=1, or ep=1.",
            kind="ep in a pipeline, which transformers refuses",
        )
    if plan.clip_grad_norm is not None:
        raise PlanRefused(
            f"clip_grad_norm={plan.clip_grad_norm:g} beside {named} fails in torch.nn.utils.clip_grad_norm_ "
            "('All operands in aten.stack.default must have the same mesh'); leave it out, or use ep=1.",
            kind="gradient clipping beside ep, which fails in PyTorch",
        )
    not_modelled = (
        (plan.ddp, f"zero={plan.zero}, dp={plan.dp}", "zero=2 or 3: DDP would average different experts"),
        (plan.fsdp and options.fsdp_version == 1, "fsdp_version=1", "fsdp_version=2"),
        (plan.offload, "offload=True", "offload=False"),
        (plan.formats.loss_scaled, f"precision={plan.precision!r}", "precision='bf16-mixed'"),
        (options.fsdp_units == "model", "fsdp_units='model'", "fsdp_units='block'"),
        (options.fsdp_blocks > 1, f"fsdp_blocks={options.fsdp_blocks}", "fsdp_blocks=1"),
        (plan.recompute_blocks is not None, "recompute_blocks", "all blocks or none"),
    )
    check_beside(named, "ep", "ep=1", not_modelled)


def _check_mixture(model: Model, plan: Plan) -> None:
    """Raise for what torchtitan does not do with its mixtures of experts, or what has no rule there.

    Source: torchtitan/distributed/fsdp.py (`apply_fsdp_to_decoder`).
    """
    if not is_of_torchtitan(model):
        return
    options = torch_options(plan)
    not_modelled = (
        (not plan.fsdp, f"zero={plan.zero}", "zero=2 or 3: torchtitan shards them by FSDP2"),
        (plan.fsdp and options.fsdp_version == 1, "fsdp_version=1", "fsdp_version=2"),
        (options.fsdp_units != "block+ends", f"fsdp_units={options.fsdp_units!r}", "fsdp_units='block+ends'"),
        (options.fsdp_blocks > 1, f"fsdp_blocks={options.fsdp_blocks}", "fsdp_blocks=1"),
        (plan.tp > 1, f"tp={plan.tp}", "tp=1"),
        (plan.cp > 1, f"cp={plan.cp}", "cp=1"),
        (
            plan.dp > model.n_experts,
            f"dp={plan.dp}, more ranks than a block has experts, of which another dim is then sharded,",
            f"dp={model.n_experts} or less, beside dp_replicate or pp",
        ),
        (plan.offload, "offload=True", "offload=False"),
        (plan.adapters is not None, "lora_rank", "none"),
        (plan.formats.loss_scaled, f"precision={plan.precision!r}", "precision='bf16-mixed'"),
        (options.compile != "none", f"compile={options.compile!r}", "compile='none'"),
        (options.float8 != "none", f"float8={options.float8!r}", "float8='none'"),
        (options.no_sync, "no_sync=True", "no_sync=False"),
        (options.trainer != "none", f"trainer={options.trainer!r}", "trainer='none'"),
        (options.optimizer_in_backward, "optimizer_in_backward=True", "optimizer_in_backward=False"),
        (options.activation_offloading != "none", "activation_offloading", "none"),
    )
    for asked, what, other in not_modelled:
        if asked:
            raise MissingRule(
                f"{what} has no rule for torchtitan's mixture {model.name}; use {other}.",
                kind=f"{what.partition('=')[0]} of torchtitan's mixtures",
            )


def _check_context(model: Model, plan: Plan) -> None:
    """Raise for context-parallel ranks beside what does not run with them, or has no rule.

    Source: `torch.distributed.tensor.experimental._context_parallel._load_balancer:_HeadTailLoadBalancer`.
    """
    if plan.cp == 1:
        return
    named, pieces = f"cp={plan.cp}", 2 * plan.cp
    if model.divides_itself:
        raise MissingRule(
            f"{named} has no rule for {model.code}, the implementation {model.implementation!r} of "
            f"{model.name}; use implementation='huggingface', a config.json, or cp=1.",
            kind="cp on code of a model that has no rule for it",
        )
    if plan.seq_len % pieces:
        raise PlanRefused(
            f"seq_len={plan.seq_len}: context_parallel cuts a sequence into 2 x cp = {pieces} equal pieces; "
            f"use seq_len={-(-plan.seq_len // pieces) * pieces}.",
            kind="sequences that do not divide into 2 x cp pieces",
        )
    not_modelled = ((plan.ep > 1, f"ep={plan.ep}", "ep=1"),)
    check_beside(named, "cp", "cp=1", not_modelled)


def _check_divided(model: Model, plan: Plan) -> None:
    """Raise for what the plan of a module's own framework does not do, or what no trace of one rank says."""
    if model.divides_itself or plan.tp == 1:
        return
    if plan.sequence_parallel:
        raise MissingRule(
            f"sequence_parallel=True: {model.name} is divided by its framework's own plan, which divides no "
            "sequence between its regions; use sequence_parallel=False.",
            kind="sequence_parallel of a model that is divided by its framework's own plan",
        )
    if plan.ddp:
        raise MissingRule(
            f"zero={plan.zero}, dp={plan.dp} beside tp={plan.tp}: DistributedDataParallel makes plain "
            f"tensors of DTensors, which has no rule for {model.name} yet; use zero=2 or 3, or dp=1.",
            kind="DDP beside tensor parallelism of a model that is divided by its framework's own plan",
        )


def _check_trainer(model: Model, plan: Plan) -> None:
    """Raise for what transformers' Trainer is not told, or does by no rule that is known."""
    options = torch_options(plan)
    _check_options_of_trainers(plan)
    if options.trainer == "none":
        return
    asked = f"trainer={options.trainer!r}"
    if not model.takes_padding_mask and model.config_values() is None:
        raise MissingRule(
            f"{asked} of {model.name}: it calls models of transformers, whose config.json is known; use one "
            "with implementation='huggingface', or trainer='none'.",
            kind="the Trainer with a model that is none of transformers",
        )
    if plan.optimizer != "adamw":
        raise MissingRule(
            f"{asked} with optimizer={plan.optimizer!r}: weights with and without decay are separate groups, "
            "which has rules for its default alone; use optimizer='adamw' with optimizer_impl='fused' "
            "(adamw_torch_fused).",
            kind="the Trainer with another optimizer than its default",
        )
    flat = plan.fsdp and options.fsdp_version == 1
    ends = "block" if flat or ends_are_tied(model) else "block+ends"
    _check_beside_option(
        plan,
        "trainer",
        "the Trainer",
        *_divided_over(plan, (*NOT_COMPILED, "dp_replicate")),
        (plan.zero == 1, "zero=1", "zero=0, 2 or 3"),
        (plan.recompute == "selective", "recompute='selective'", "recompute='full'"),
        (plan.recompute_blocks is not None, f"recompute_blocks={plan.recompute_blocks}", "all blocks"),
        (plan.offload, "offload=True", "offload=False"),
        (not options.set_to_none, "set_to_none=False", "set_to_none=True"),
        *((getattr(options, name) != getattr(USUAL, name), name, "its default") for name in _NOT_TOLD),
        (flat and plan.zero == 2, "zero=2 (Accelerate takes FULL_SHARD all the same)", "zero=3"),
        (flat and plan.n_micro_batches > 1 and not options.no_sync, "no_sync=False", "no_sync=True"),
        (
            plan.fsdp and not model.takes_padding_mask,
            f"zero={plan.zero} of {model.name}, which is no rotary decoder whose rules are known",
            "zero=0",
        ),
        (
            plan.fsdp and plan.adapters is not None and ends == "block",
            f"zero={plan.zero}, lora_rank={plan.lora_rank} of tied ends",
            "zero=0, or a model with a head",
        ),
        (
            plan.fsdp and not _ENDS.isdisjoint(f"{plan.lora_targets},{plan.modules_to_save}".split(",")),
            f"zero={plan.zero}, lora_rank={plan.lora_rank} with adapters or copies of the ends",
            "zero=0, or lora_targets='all-linear'",
        ),
        *(_not_by_trainers_of_trl(model, plan) if options.trainer in OF_TRL else ()),
        *(_not_by_dpo(plan) if options.trainer == "dpo" else ()),
        *(_not_by_grpo(plan) if options.trainer == "grpo" else ()),
    )
    _check_set_by_trainer(plan, ends)


def _check_options_of_trainers(plan: Plan) -> None:
    """Raise for options of one of TRL's trainers under another one, and for completions without a length."""
    options = torch_options(plan)
    for trainer, names in OF_TRAINERS.items():
        for name in names if options.trainer != trainer else ():
            if (value := getattr(options, name)) != getattr(USUAL, name):
                own = f"{trainer.upper()}Trainer"
                raise PlanRefused(
                    f"{name}={value!r} is of TRL's {own}, not of trainer={options.trainer!r}; leave it out, "
                    f"or use trainer={trainer!r}.",
                    kind=f"options of {own} on plans that do not use it",
                )
    if options.trainer != "grpo":
        return
    name, length = "max_completion_length", options.max_completion_length
    if length is None or length >= plan.seq_len:
        raise PlanRefused(
            f"trainer='grpo' with {name}={length}: a completion is the last tokens of "
            f"seq_len={plan.seq_len}, after a prompt; use a {name} below seq_len, as "
            f"{name}={max(plan.seq_len // 2, 1)}.",
            kind="GRPOTrainer without a length of completions",
        )
    if plan.global_batch < 2:
        raise PlanRefused(
            f"trainer='grpo' with global_batch={plan.global_batch}: completions of a prompt are compared "
            "with each other (num_generations is at least 2); use global_batch=2 or more.",
            kind="GRPOTrainer with a single completion",
        )


def _check_set_by_trainer(plan: Plan, ends: str) -> None:
    """Raise for options that the Trainer sets itself, all at once; `ends`: FSDP's units of the model."""
    options, fits = torch_options(plan), plan.precision in _FSDP_PRECISIONS
    sets = {"optimizer_impl": "fused"}
    if plan.fsdp:
        sets |= {"fsdp_units": ends, "precision": plan.precision if fits else _FSDP_PRECISIONS[-1]}
    asked = {name: getattr(plan if name == "precision" else options, name) for name in sets}
    others = [name for name, value in sets.items() if asked[name] != value]
    if others:
        found = ", ".join(f"{name}={asked[name]!r}" for name in others)
        raise MissingRule(
            f"trainer={options.trainer!r} with {found}: the Trainer's update is fused, and under FSDP "
            "gradients are reduced in the type that weights have; use "
            f"{', '.join(f'{name}={sets[name]!r}' for name in others)}, or trainer='none'.",
            kind="the Trainer with other options than it sets",
        )


def _not_by_dpo(plan: Plan) -> tuple[tuple[bool, str, str], ...]:
    """What has no rule under TRL's DPOTrainer, or does not run there, as rows of `_check_trainer`."""
    return (
        (
            plan.micro_batch % 2 > 0,
            f"micro_batch={plan.micro_batch}: pairs of a chosen and a rejected sequence",
            f"micro_batch={plan.micro_batch + 1}, and a global_batch that is a multiple of it",
        ),
        _not_gathered_for_good(plan),
    )


def _not_by_grpo(plan: Plan) -> tuple[tuple[bool, str, str], ...]:
    """What has no rule under TRL's GRPOTrainer, as rows of `_check_trainer`."""
    return (_not_gathered_for_good(plan),)


def _not_gathered_for_good(plan: Plan) -> tuple[bool, str, str]:
    """A frozen copy that is never sharded again, as no backward pass goes through it."""
    called = called_by_trainer(plan)
    return (
        plan.zero == 2 and called is not None and called.reference == "sharded copy",
        "zero=2, under which the reference stays gathered from the first step on",
        "zero=3",
    )


def _not_by_trainers_of_trl(model: Model, plan: Plan) -> tuple[tuple[bool, str, str], ...]:
    """What has no rule under TRL's trainers, as rows of `_check_trainer`."""
    head = model.vocab_size if isinstance(model, Decoder) else 0
    return (
        (plan.fsdp and torch_options(plan).fsdp_version == 1, "fsdp_version=1", "fsdp_version=2"),
        (
            plan.fsdp and ends_are_tied(model),
            f"zero={plan.zero} of tied ends",
            "zero=0, or a model with a head",
        ),
        (plan.formats.loss_scaled, f"precision={plan.precision!r}", "precision='bf16-mixed'"),
        (
            plan.quantize != "none" and plan.formats.stored == FP32,
            f"quantize={plan.quantize!r}, precision={plan.precision!r} (it has adapters in bfloat16)",
            "precision='bf16-autocast'",
        ),
        (
            plan.adapters is not None
            and not _ENDS.isdisjoint(f"{plan.lora_targets},{plan.modules_to_save}".split(",")),
            f"lora_rank={plan.lora_rank} with adapters or copies of the ends",
            "lora_targets='all-linear'",
        ),
        (
            gathers_head(plan) and head % plan.dp > 0,
            f"zero={plan.zero}, lora_rank={plan.lora_rank}, dp={plan.dp} that does not divide the vocabulary",
            f"a dp that divides {head}",
        ),
    )


_ENDS: Final = frozenset(("lm_head", "embed_out", "embed_tokens", "embed_in", "norm", "final_layer_norm"))
"""The names of modules outside the blocks, whose units are others where these are adapted or copied."""

_FSDP_PRECISIONS: Final = ("fp32", "bf16", "bf16-mixed-reduce-bf16")
"""The precisions that the Trainer has under FSDP, by Accelerate."""

_NOT_TOLD: Final = (
    *("static_graph", "gradient_as_bucket_view", "ddp_comm_hook", "compile", "float8", "fsdp_blocks"),
    *("torch_version", "liger_kernel", "activation_offloading", "chunked_loss"),
)
"""The options that have no rule beside the Trainer."""


def check_trace(model: Model, plan: Plan) -> None:
    """Raise for a plan that the trace of a divided module says nothing about.

    Raises:
        MissingRule: with value, rule and way out.
    """
    for check in (_check_traced, _check_recorded, _check_traced_ends, _check_cut, _check_even_shards):
        check(model, plan)


def _check_recorded(model: Model, plan: Plan) -> None:
    """Raise for weights of a type that a module was traced with in no run."""
    if not isinstance(model, TracedModel):
        return
    weights = weight_dtype(plan).name
    known = sorted({variant.weights for variant in model.recordings})
    if weights not in known:
        raise MissingRule(
            f"precision={plan.precision!r} with zero={plan.zero} takes weights in {weights}, and "
            f"{model.name} was traced with weights in {' or '.join(known)} only; use precision='fp32', or a "
            "mixed one with zero=0 or 1, or trace it again so, if PyTorch runs it so (on CUDA no batch norm "
            "with weights in bfloat16).",
            kind="a traced model with weights of a type that it was not traced with",
        )


def _check_cut(model: Model, plan: Plan) -> None:
    """Raise for a pipeline of a traced module that cannot be cut into stages."""
    if not isinstance(model, TracedModel) or plan.pp == 1 or not model.n_layers:
        return
    weights, recompute = weight_dtype(plan).name, plan.recompute
    for variant, recording in model.recordings.items():
        if (variant.weights, variant.recompute) == (weights, recompute):
            checked_cut(model, recording)


def _check_traced_ends(model: Model, plan: Plan) -> None:
    """Raise if a trace does not say where the modules outside the blocks run, which are to be units."""
    if not isinstance(model, TracedModel) or torch_options(plan).fsdp_units != "block+ends":
        return
    if plan.pp > 1 and plan.zero == 3 and not any(one.requires_grad for one in model.embed_parameters):
        raise MissingRule(
            f"fsdp_units='block+ends' in a pipeline makes a unit of {model.name}'s frozen modules before the "
            "blocks, which each backward pass gathers and does not use: that has no rule yet; use "
            "fsdp_units='block'.",
            kind="fsdp_units=block+ends of a pipeline with nothing trained before the blocks",
        )
    if plan.pp > 1 and any(variant.units == "block+ends" for variant in model.recordings):
        raise MissingRule(
            f"fsdp_units='block+ends' in a pipeline: {model.name} asks for the type of weights outside their "
            "unit, which only before the first micro-batch is that of their shards; use fsdp_units='block'.",
            kind="fsdp_units=block+ends of a pipeline of a model that asks for types of weights",
        )
    for recording in model.recordings.values():
        if not isinstance(recording.ends, Ends):
            why = recording.ends or "its trace is of an earlier memplan; trace it again"
            raise MissingRule(
                f"fsdp_units='block+ends': where the modules outside the blocks of {model.name} run is not "
                f"known ({why}); use fsdp_units='block' or 'model'.",
                kind="fsdp_units=block+ends of a traced model whose modules outside the blocks are not known",
            )


REFUSALS: Final[tuple[Callable[[Model, Plan], None], ...]] = (
    _check_wrappers,
    _check_fsdp1,
    _check_no_sync,
    _check_static_graph,
    _check_units,
    _check_experts,
    _check_mixture,
    _check_context,
    _check_divided,
    _check_adapters,
    _check_trainer,
    _check_compiled,
    _check_float8,
    _check_float8_all_gather,
    _check_activation_offloading,
    _check_liger,
    _check_chunked_loss,
    _check_optimizer_in_backward,
    _check_recordings,
    _check_traced,
    _check_recorded,
    _check_scalars,
    _check_traced_ends,
    _check_cut,
    _check_code,
    _check_sizes,
    check_sequence,
    check_layers,
    _check_ends,
    _check_unused,
    _check_stages,
    _check_micro_batches,
    _check_split_backward,
    _check_data_axis,
    _check_precision,
    _check_update,
    _check_muon,
    _check_adafactor,
    _check_other_of_torch,
    _check_bitsandbytes,
    _check_torchao,
    _check_offload_gradients,
    check_positions,
)
"""The rules in the order in which they are asked."""


def check_device(plan: Plan, device: Device) -> None:
    """Raise if PyTorch runs the plan on this device, but computes it wrongly.

    Source: pytorch/pytorch issue 191763 (torch 2.12, 2.13).

    Raises:
        PlanRefused: with value, rule and way out.
    """
    if device.on_cpu and (package := plan.kept.package) in ("bitsandbytes", "torchao"):
        raise MissingRule(
            f"optimizer={plan.optimizer!r} of {package} has rules on GPUs only; use adamw, or device='cuda'.",
            kind=f"an optimizer of {package} on CPU",
        )
    if device.on_cpu and plan.quantize != "none":
        raise MissingRule(
            f"quantize={plan.quantize!r} of bitsandbytes has rules on GPUs only; use quantize='none', or "
            "device='cuda'.",
            kind="quantized weights on CPU",
        )
    if device.on_cpu and torch_options(plan).liger_kernel != "none":
        raise PlanRefused(
            f"liger_kernel={torch_options(plan).liger_kernel!r} is of Triton, which compiles for GPUs; use "
            "liger_kernel='none'.",
            kind="Liger's kernels on CPU",
        )
    recipe = torch_options(plan).float8
    is_nvidia = device.capability is not None
    if recipe != "none" and (device.on_cpu or (is_nvidia and not device.at_least(8, 9))):
        raise PlanRefused(
            f"float8={recipe!r} multiplies by torch._scaled_mm, which GPUs of compute capability 8.9 or more "
            "have (Ada, Hopper, Blackwell); use such a GPU, or float8='none'.",
            kind="float8 on a device without products in float8",
        )
    if recipe.startswith("rowwise") and is_nvidia and not device.at_least(9):
        raise MissingRule(
            f"float8={recipe!r} has no rule before compute capability 9.0; use float8='tensorwise'.",
            kind="rowwise float8 before Hopper",
        )
    sgd, fused = plan.optimizer in ("sgd", "sgd-momentum"), torch_options(plan).optimizer_impl == "fused"
    if device.on_cpu and plan.formats.stored == BF16 and sgd and fused:
        raise PlanRefused(
            f"optimizer={plan.optimizer!r} with optimizer_impl='fused' leaves most bfloat16 weights as they "
            "are on CPU (pytorch issue 191763); use optimizer_impl='foreach' or 'for-loop'.",
            kind="fused bfloat16 SGD on CPU, which PyTorch computes wrongly",
        )
