"""Plans that DeepSpeed does not run, or that no rule covers yet: each check raises with a way out."""

from collections.abc import Callable
from math import gcd
from typing import Final

from memplan.engines.deepspeed.options import OF_STAGE_3, DeepSpeedOptions, deepspeed_options
from memplan.engines.refusals import check_beside, check_modelled, check_positions
from memplan.errors import MissingRule, PlanRefused, divisors_text
from memplan.models import Model, TracedModel, ends_are_tied
from memplan.models.gpt import Gpt
from memplan.models.llama import Llama
from memplan.models.lookup import HOOKED
from memplan.models.torchtitan import TorchtitanLlama
from memplan.plan import Plan

PRECISIONS: Final = ("bf16-mixed", "fp16-mixed")
"""`bf16.enabled`, `fp16.enabled`."""

DUALPIPE: Final = "dualpipe-v"
"""The schedule that DeepSpeed has a module and an engine of its own for."""


def _check_modelled(model: Model, plan: Plan) -> None:
    """Raise for what has no rule yet, with DeepSpeed's name of it.

    Under ZeRO-3 transformers' modules are traced; in memplan's own no module has the parameter of another.
    """
    tied = isinstance(model, Llama | Gpt | TorchtitanLlama) and ends_are_tied(model)
    partly = isinstance(model, TracedModel) and model.frozen
    unused = model.unused if isinstance(model, TracedModel) else ()
    halves = " or ".join(map(repr, PRECISIONS))
    options: tuple[tuple[bool, str, str], ...] = (
        (plan.offload, "offload=True", "offload_optimizer='cpu'"),
        (
            deepspeed_options(plan).offload_param != "none"
            and deepspeed_options(plan).offload_optimizer == "none",
            "offload_param='cpu' beside optimizer states on the GPU",
            "offload_optimizer='cpu' too",
        ),
        (
            deepspeed_options(plan).offload_param != "none"
            and deepspeed_options(plan).zero_hpz_partition_size > 1,
            "zero_hpz_partition_size beside partitions of weights on the host",
            "offload_param='none'",
        ),
        (plan.precision not in PRECISIONS, f"precision={plan.precision!r}", f"{halves} (bf16, fp16.enabled)"),
        (
            plan.optimizer not in ("adam", "adamw"),
            f"optimizer={plan.optimizer!r}",
            "'adamw' or 'adam' (FusedAdam)",
        ),
        (
            plan.zero == 3 and tied,
            f"zero=3 of tied ends in memplan's own modules, as {model.name} has,",
            "implementation='huggingface'",
        ),
        (bool(unused), f"{model.name}, whose {min(unused, default='')} gets no gradient,", "frozen weights"),
        (plan.zero == 3 and bool(partly), f"zero=3 of {model.name}, of which a part is frozen,", "zero=2"),
        (plan.zero == 3 and plan.recompute == "selective", "recompute='selective' with zero=3", "'full'"),
    )
    check_modelled("deepspeed", "DeepSpeed", options)


def _check_options(model: Model, plan: Plan) -> None:
    """Raise for ranks that ZeRO does not divide anything over, and for options of another stage."""
    if plan.n_shards * plan.tp * plan.pp == 1:
        raise PlanRefused(
            "dp=1: engine='deepspeed' plays several ranks; use dp of 2 or more.",
            kind="DeepSpeed on a single rank",
        )
    options, usual = deepspeed_options(plan), DeepSpeedOptions()
    if plan.dp % options.zero_hpz_partition_size:
        raise PlanRefused(
            f"zero_hpz_partition_size={options.zero_hpz_partition_size} does not divide dp={plan.dp}; use a "
            "number of ranks that does, as the GPUs of a node.",
            kind="hpZ ranks that do not divide dp",
        )
    unused = () if plan.zero == 3 else OF_STAGE_3
    own = "overlap_comm", "reduce_bucket_size", "offload_optimizer"
    for name in unused if plan.zero else (*own, *unused):
        if (value := getattr(options, name)) != getattr(usual, name):
            raise PlanRefused(
                f"{name}={value} is of another ZeRO stage than zero={plan.zero}; leave it out.",
                kind="options of another ZeRO stage",
            )


def _check_sequences(model: Model, plan: Plan) -> None:
    """Raise for models and sequences that Ulysses does not divide, and for options without a rule beside it.

    Source: `deepspeed.runtime.sequence_parallel.ulysses_sp:UlyssesSPDataLoaderAdapter.refill`.
    """
    cp = plan.cp
    if cp == 1:
        return
    if not _is_of_transformers(model):
        raise MissingRule(
            f"cp={cp}: {model.name} ({model.code}) is no module of transformers, whose attention DeepSpeed's "
            "Ulysses exchanges heads around; use implementation='huggingface', a config.json, or cp=1.",
            kind="DeepSpeed's Ulysses of a model that is none of transformers",
        )
    if plan.seq_len % cp:
        raise PlanRefused(
            f"batch's seqlen={plan.seq_len} isn't divisible by sp-size={cp}; use "
            f"seq_len={-(-plan.seq_len // cp) * cp}.",
            kind="sequences that do not divide over the ranks of Ulysses",
        )
    not_modelled = (
        (plan.recompute == "selective", "recompute='selective'", "recompute='full'"),
        (
            deepspeed_options(plan).zero_hpz_partition_size > 1,
            "zero_hpz_partition_size",
            "zero_hpz_partition_size=1",
        ),
    )
    check_beside(f"cp={cp}", "cp", "cp=1", not_modelled)


def _is_of_transformers(model: Model) -> bool:
    return model.config_values() is not None and model.implementation not in HOOKED


def _check_tensor_parallel(model: Model, plan: Plan) -> None:
    """Raise for models that AutoTP does not divide here, and for options without a rule beside it."""
    tp = plan.tp
    if tp == 1:
        return
    if not _is_of_transformers(model):
        raise MissingRule(
            f"tp={tp}: {model.name} ({model.code}) is no module of transformers, by whose plan DeepSpeed's "
            "AutoTP divides linears; use implementation='huggingface', a config.json, or tp=1.",
            kind="DeepSpeed's AutoTP of a model that is none of transformers",
        )
    sizes = model.sizes_over_tp
    if left := [f"{name}={total}" for name, total in sizes.items() if total % tp]:
        raise MissingRule(
            f"tp={tp} does not divide {left[0]}: DeepSpeed's AutoTP gives ranks shards that are not equal, "
            f"which has no rule yet; use one of {divisors_text(gcd(*sizes.values()))}.",
            kind="DeepSpeed's AutoTP with shards that are not equal",
        )
    if plan.sequence_parallel:
        raise PlanRefused(
            "sequence_parallel=True: DeepSpeed's AutoTP divides no sequence; use sequence_parallel=False.",
            kind="DeepSpeed's AutoTP with sequence parallelism",
        )
    not_modelled = (
        (plan.zero == 3, "zero=3", "zero=2"),
        (plan.cp > 1, f"cp={plan.cp}", "cp=1"),
        (plan.recompute == "selective", "recompute='selective'", "recompute='full'"),
    )
    check_beside(f"tp={tp}", "tp", "tp=1", not_modelled)


def _check_pipeline(model: Model, plan: Plan) -> None:
    """Raise for what DeepSpeed's pipeline engine does not run, and for what has no rule beside it.

    Source: `deepspeed.runtime.pipe.engine:PipelineEngine.__init__`,
    `deepspeed.runtime.engine:DeepSpeedEngine._configure_zero_optimizer`.
    """
    options, pp = deepspeed_options(plan), plan.pp
    if pp == 1:
        for name in ("partition_method", "activation_checkpoint_interval"):
            if (value := getattr(options, name)) != getattr(DeepSpeedOptions(), name):
                raise PlanRefused(
                    f"{name}={value!r} is of pipelines; leave it out, or use pp=2 or more.",
                    kind="options of DeepSpeed's pipelines without a pipeline",
                )
        return
    whole = isinstance(model, Llama | Gpt | TorchtitanLlama) and not _is_of_transformers(model)
    _check_schedule(plan)
    not_modelled = (
        (plan.schedule == DUALPIPE, f"schedule={DUALPIPE!r} (DualPipeVModule)", "schedule='1f1b'"),
        (plan.tp > 1, f"tp={plan.tp}", "tp=1"),
        (plan.cp > 1, f"cp={plan.cp}", "cp=1"),
        (not whole, f"{model.name} ({model.code}), no list of layers,", "implementation='reference'"),
        (whole and ends_are_tied(model), f"tied ends, as {model.name} has,", "a model with untied ends"),
        (options.offload_optimizer != "none", "offload_optimizer", "offload_optimizer='none'"),
        (
            options.activation_checkpoint_interval > 0 and plan.recompute != "none",
            f"activation_checkpoint_interval beside recompute={plan.recompute!r}",
            "recompute='none'",
        ),
        (plan.recompute_blocks is not None, "recompute_blocks", "recompute of all blocks"),
    )
    check_beside(f"pp={pp}", "pp", "pp=1", not_modelled)
    if model.n_blocks + 2 < pp:
        raise PlanRefused(
            f"pp={pp}: {model.name} has {model.n_blocks + 2} layers for DeepSpeed's PipelineModule, the "
            "embedding and the head counted, and every stage needs one; use "
            f"pp={model.n_blocks + 2} or less.",
            kind="a stage of DeepSpeed's pipeline without layers",
        )


def _check_schedule(plan: Plan) -> None:
    """Raise for what its TrainSchedule does not run."""
    refused = (
        (
            plan.zero >= 2,
            f"zero={plan.zero}: ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism; use zero=1 or "
            "zero=0.",
        ),
        (
            plan.schedule not in ("1f1b", DUALPIPE),
            f"schedule={plan.schedule!r}: DeepSpeed's TrainSchedule runs forward and backward passes in "
            "turn; use schedule='1f1b'.",
        ),
        (
            plan.virtual_stages > 1 and plan.schedule != DUALPIPE,
            f"virtual_stages={plan.virtual_stages}: a rank of DeepSpeed's TrainSchedule has one stage; use "
            "virtual_stages=1.",
        ),
        (
            plan.layers_per_stage is not None,
            "layers_per_stage: DeepSpeed's PipelineModule deals layers out itself; use partition_method.",
        ),
        (
            deepspeed_options(plan).overlap_comm is True,
            "overlap_comm=True: Pipeline parallelism does not support overlapped communication; leave it "
            "out.",
        ),
    )
    for text in [text for found, text in refused if found]:
        raise PlanRefused(text, kind="what DeepSpeed's pipeline engine does not run")


REFUSALS: Final[tuple[Callable[[Model, Plan], None], ...]] = (
    _check_modelled,
    _check_options,
    _check_pipeline,
    _check_tensor_parallel,
    _check_sequences,
    check_positions,
)
"""The checks of a plan, in order."""
