"""Megatron-LM's arguments as a plan: a line of flags, or a model_config.yaml of its functional tests.

Source: megatron.training.arguments (of 6e091e1b68): the flags, and what `validate_args` makes of them.
"""

import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath
from textwrap import wrap
from typing import Any, ClassVar, Final, final

from memplan.checks import checked_count
from memplan.engines.options import not_usual
from memplan.errors import InvalidValue, MissingRule, PlanRefused, reason, shown_value
from memplan.fields import count_or_text, number_or_text
from memplan.launchers.base import Job, Launcher, Limit, Read, yaml_values
from memplan.launchers.megatron_arguments import arguments
from memplan.launchers.torchrun import torchrun_command
from memplan.models import Model
from memplan.models.base import MOST_LAYERS
from memplan.models.megatron import MLA, BertModel, GPTModel, MoE, gpt_model

GPT_SCRIPT: Final = "pretrain_gpt.py"
BERT_SCRIPT: Final = "pretrain_bert.py"

CONTINUED: Final = " \\\n    "
"""Between the lines of one command of a shell."""

LINE: Final = 110
"""Columns of a comment's longest lines."""

WORKSPACES: Final = "CUBLAS_WORKSPACE_CONFIG"
"""The variable of the environment that says the size of cuBLAS's workspaces."""

WARMUP_FLUSH: Final = "overlap-p2p-communication-warmup-flush"
"""The argument whose option has another name."""

PADDING: Final = "moe-router-padding-for-quantization"
"""The argument that has the router pad tokens for products in 8 bits; `PADDING_FOR_FP8` is its older name."""

PADDING_FOR_FP8: Final = "moe-router-padding-for-fp8"

IN_FP32: Final = ("attention-softmax-in-fp32", "apply-query-key-layer-scaling")
"""The flags that ask for a softmax in float32, the second by scaling it."""

FLAG_WORDS: Final = {"true": True, "false": False}
"""The values of a flag in a YAML file."""

OF_DEEPSPEED: Final = (
    *("zero-stage", "checkpoint-activations", "checkpoint-num-layers", "pp-partition-method"),
    *("embed-layernorm", "pad-vocab-size-to"),
)
"""The arguments that Megatron-DeepSpeed of 2022 has, and Megatron-Core has not."""

READ: Final = frozenset(
    [
        "num-layers",
        "hidden-size",
        "ffn-hidden-size",
        "num-attention-heads",
        "group-query-attention",
        "num-query-groups",
        "kv-channels",
        "seq-length",
        "max-position-embeddings",
        "vocab-size",
        "make-vocab-size-divisible-by",
        "untie-embeddings-and-output-weights",
        "hidden-dropout",
        "attention-dropout",
        "normalization",
        "swiglu",
        "disable-bias-linear",
        "add-qkv-bias",
        "position-embedding-type",
        "rotary-percent",
        "rotary-interleaved",
        "no-rope-fusion",
        "qk-layernorm",
        "multi-latent-attention",
        "q-lora-rank",
        "kv-lora-rank",
        "qk-head-dim",
        "qk-pos-emb-head-dim",
        "v-head-dim",
        "mtp-num-layers",
        "tensor-model-parallel-size",
        "pipeline-model-parallel-size",
        "sequence-parallel",
        "context-parallel-size",
        "cp-comm-type",
        "hierarchical-context-parallel-sizes",
        "expert-model-parallel-size",
        "expert-tensor-parallel-size",
        "num-experts",
        "moe-ffn-hidden-size",
        "moe-layer-freq",
        "moe-router-topk",
        "moe-router-load-balancing-type",
        "moe-aux-loss-coeff",
        "moe-router-score-function",
        "moe-router-pre-softmax",
        "moe-router-enable-expert-bias",
        "moe-router-dtype",
        "moe-shared-expert-intermediate-size",
        "moe-token-dispatcher-type",
        "moe-grouped-gemm",
        "moe-permute-fusion",
        PADDING,
        PADDING_FOR_FP8,
        "no-bias-gelu-fusion",
        "num-layers-per-virtual-pipeline-stage",
        "num-virtual-stages-per-pipeline-rank",
        "decoder-first-pipeline-num-layers",
        "decoder-last-pipeline-num-layers",
        "account-for-embedding-in-pipeline-split",
        "account-for-loss-in-pipeline-split",
        "microbatch-group-size-per-virtual-pipeline-stage",
        "micro-batch-size",
        "global-batch-size",
        "bf16",
        "fp16",
        "use-distributed-optimizer",
        "overlap-grad-reduce",
        "overlap-param-gather",
        WARMUP_FLUSH,
        "overlap-param-gather-with-optimizer-step",
        "tp-comm-overlap",
        "fp8-format",
        "fp8-recipe",
        "fp8-param-gather",
        "fp8-amax-history-len",
        "first-last-layers-bf16",
        "num-distributed-optimizer-instances",
        "accumulate-allreduce-grads-in-fp32",
        "ddp-bucket-size",
        "clip-grad",
        "transformer-impl",
        "attention-backend",
        "spec",
        "bert-no-binary-head",
        "cross-entropy-loss-fusion",
        "cross-entropy-fusion-impl",
        "deterministic-mode",
        "optimizer",
        "no-use-layer-wise-param-layout",
        "use-precision-aware-optimizer",
        "main-grads-dtype",
        "exp-avg-dtype",
        "exp-avg-sq-dtype",
        "defer-embedding-wgrad-compute",
        "wgrad-deferral-limit",
        "no-gradient-accumulation-fusion",
        "no-masked-softmax-fusion",
        "no-create-attention-mask-in-dataloader",
        "recompute-granularity",
        "recompute-method",
        "recompute-num-layers",
        "recompute-modules",
        "pipeline-model-parallel-layout",
        "deepspeed",
        *OF_DEEPSPEED,
    ]
)
"""The arguments that are read."""

HARMLESS: Final = (
    *(
        "adam-beta",
        "adam-eps",
        "async-",
        "ckpt-",
        "dist-ckpt-",
        "no-ckpt-",
        "data-path",
        "data-cache",
        "eval-",
    ),
    *(
        "exit-",
        "log-",
        "logging-",
        "lr",
        "min-lr",
        "decoupled-",
        "manual-gc",
        "save",
        "load",
        "no-save",
        "no-load",
    ),
    *("wandb-", "tokenizer-", "legacy-tokenizer", "vocab-file", "merge-file", "split", "mock-data", "fim-"),
    *("tensorboard-", "timing-", "train-", "weight-decay", "start-weight-decay", "end-weight-decay", "seed"),
    *("init-method-std", "num-workers", "distributed-backend", "distributed-timeout", "norm-epsilon"),
    *("rotary-base", "check-", "no-check-for-nan", "verify-integrity", "use-mcore-models", "use-checkpoint"),
    *(
        "use-persistent-ckpt",
        "use-tp-pp-dp-mapping",
        "test-mode",
        "auto-detect-ckpt",
        "finetune",
        "override-",
    ),
    *("no-mmap", "disable-gloo", "attention-softmax-in-fp32", "apply-query-key-layer-scaling"),
    *("ddp-average-in-collective", "calculate-per-token-loss", "apply-layernorm-1p", "enable-experimental"),
    *(
        "moe-router-bias-update-rate",
        "moe-router-num-groups",
        "moe-router-group-topk",
        "moe-router-topk-scaling",
    ),
    *(
        "muon-momentum",
        "muon-extra-scale-factor",
        "muon-scale-mode",
        "muon-coefficient-type",
        "muon-no-split",
    ),
    *("rotary-scaling-factor", "mscale", "original-max-position-embeddings", "mtp-loss-scaling-factor"),
    *("fp8-margin", "fp8-interval", "fp8-amax-compute-algo", "tp-comm-overlap-cfg", "tp-comm-bootstrap-"),
    *("deepspeed-activation-checkpointing", "deepspeed_config", "abort-on-unmet-fused-kernel-constraints"),
    *("no-persist-layer-norm", "use-flash-attn", "accumulate-allreduce-grads-in-fp32"),
)
"""How the names of arguments begin that change no byte of a step."""

POSITIONS: Final = ("learned_absolute", "rope", "none", "alibi")
"""The position embeddings that have rules, Megatron's default first."""

DISPATCHERS: Final = ("allgather", "alltoall")
"""The token dispatchers that have rules, Megatron's default first."""

LOAD_BALANCING: Final = ("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none")
"""How routers balance experts, Megatron's default first."""

AT: Final[Mapping[str, tuple[Any, ...]]] = {
    "muon-fp32-matmul-prec": ("medium",),
    "muon-num-ns-steps": (5,),
    "muon-scalar-optimizer": ("adam",),
    "muon-tp-mode": ("blockwise",),
    "main-params-dtype": ("fp32",),
    "cuda-graph-impl": ("none",),
    "num-layers-at-start-in-bf16": (1,),
    "num-layers-at-end-in-bf16": (1,),
}
"""The values at which other arguments change nothing."""


@final
class Megatron(Launcher):
    """Megatron-LM's pretrain_gpt.py."""

    engine: ClassVar[str] = "megatron"
    file: ClassVar[str] = "pretrain_gpt.sh"

    def limits(self, job: Job) -> Iterator[Limit]:
        if job.estimate.device.on_cpu:
            yield Limit("device='cpu': Megatron is told of GPUs here", {"device": None})
        if not_usual(job.estimate.plan).get("megatron_deepspeed"):
            yield Limit(
                "megatron_deepspeed=True: these are Megatron-LM's arguments of today",
                {"megatron_deepspeed": False},
            )

    def notes(self, job: Job) -> Iterator[str]:
        yield (
            "Tokenizer, data, learning rate and length of training are yours, and so are --rotary-base, "
            "--norm-epsilon and the scaling of positions. To try it: --mock-data --tokenizer-type "
            "NullTokenizer --lr 1e-4 --train-iters 10."
        )

    def text(self, job: Job, notes: tuple[str, ...]) -> str:
        estimate = job.estimate
        head = [f"# {one}" for line in job.comments(notes) for one in wrap(line, LINE - 2)]
        own = gpt_model(estimate.model)
        script = BERT_SCRIPT if isinstance(own, BertModel) else GPT_SCRIPT
        command = CONTINUED.join([torchrun_command(job, script), *arguments(own, estimate.plan)])
        variables = ["CUDA_DEVICE_MAX_CONNECTIONS=1"]  # which validate_args asks for before Blackwell
        if workspaces := not_usual(estimate.plan).get("cublas_workspace_config"):
            variables.append(f"{WORKSPACES}={workspaces}")
        lines = ["#!/usr/bin/env bash", *head, *[f"export {one}" for one in variables], command]
        return "\n".join([*lines, ""])

    def read(self, text: str, model: Model | None) -> Read:
        """The keywords of `memplan.estimate`, the model among them.

        Raises:
            InvalidValue: a text that is neither a line of flags nor a YAML file with MODEL_ARGS; an argument
                with a value that it does not take.
            MissingRule: an argument that has no rule, by name.
        """
        found = Arguments(*_parsed(text))
        return Read(keywords={"model": model or found.model, **found.keywords}, notes=tuple(found.notes))


def _parsed(text: str) -> tuple[dict[str, Any], dict[str, str], str]:
    """Of either kind of file: arguments without their dashes, variables of the environment, the script."""
    if "MODEL_ARGS" not in text:
        return _of_line(text)
    values = yaml_values(text, "a model_config.yaml of Megatron's functional tests")
    arguments, environment = values.get("MODEL_ARGS"), values.get("ENV_VARS") or {}
    if not isinstance(arguments, dict) or not isinstance(environment, dict):
        raise InvalidValue("MODEL_ARGS and ENV_VARS must be mappings, as in Megatron's functional tests.")
    given = {str(key).removeprefix("--"): value for key, value in arguments.items()}
    return given, {str(key): str(value) for key, value in environment.items()}, GPT_SCRIPT


def _of_line(text: str) -> tuple[dict[str, Any], dict[str, str], str]:
    """Those of a line of flags, or of a script that starts a program with them."""
    found: dict[str, Any] = {}
    name = ""
    try:
        words = shlex.split(text.replace(CONTINUED, " "), comments=True)
    except ValueError as error:
        raise InvalidValue(f"it is no line of arguments ({reason(error)}); close every quote.") from None
    scripts = [i for i, word in enumerate(words) if word.endswith(".py")]
    begin = scripts[0] + 1 if scripts else 0
    variables = [word.partition("=") for word in words[:begin] if "=" in word and word[0] != "-"]
    for word in words[begin:]:
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            found[name] = value or True
        elif not name:
            raise InvalidValue(f"{word!r} follows no argument of Megatron's; begin with --num-layers N.")
        else:
            found[name] = word if found[name] is True else f"{found[name]} {word}"
    if not found:
        raise InvalidValue(
            "it names no argument of Megatron's; write them as --num-layers 12 --hidden-size 512."
        )
    script = PurePath(words[begin - 1]).name if scripts else GPT_SCRIPT
    return found, {name: value for name, _, value in variables}, script


def _numbers(value: Any) -> tuple[int | str, ...]:
    """Whole numbers that follow an argument, also as a list of YAML."""
    return tuple(map(count_or_text, str(value).strip("[]").replace(",", " ").split()))


class Arguments:
    """Megatron's arguments with their defaults, as `validate_args` completes them."""

    def __init__(
        self, given: Mapping[str, Any], environment: Mapping[str, str], script: str = GPT_SCRIPT
    ) -> None:
        self.given, self.environment = given, environment
        self.is_bert = script == BERT_SCRIPT or self.flag("bert-no-binary-head")
        alone = [name for name in OF_DEEPSPEED if name in given and not self.flag("deepspeed")]
        for name in alone:
            raise MissingRule(
                f"--{name} is an argument of Megatron-DeepSpeed; add --deepspeed, or leave it out.",
                kind=f"Megatron's --{name}",
            )
        for name in given:
            known = name in READ or name.startswith(HARMLESS)
            if not known and self.flag(name) and self._value(name) not in AT.get(name, ()):
                value = "" if given[name] is True else f" {shown_value(given[name])}"
                raise MissingRule(
                    f"--{name}{value} has no rule in the Megatron engine; leave it out.",
                    kind=f"Megatron's --{name}",
                )

    def _value(self, name: str) -> Any:
        value = self.given.get(name)
        return count_or_text(value) if isinstance(value, str) else value

    def flag(self, name: str) -> bool:
        """Whether a flag is given, and not as false."""
        value = self.given.get(name, False)
        return bool(FLAG_WORDS.get(str(value).lower(), True))

    def count(self, name: str, default: int | None = None) -> int:
        """A whole number.

        Raises:
            InvalidValue: no number, or none given for an argument without a default.
        """
        value = self._value(name)
        if value is None:
            if default is None:
                raise InvalidValue(f"Megatron needs --{name}; give it.")
            return default
        return checked_count(f"--{name}", value, least=0)

    def number(self, name: str, default: float) -> float:
        """A number.

        Raises:
            InvalidValue: anything else.
        """
        value = number_or_text(str(self.given.get(name, default)))
        if isinstance(value, str):
            raise InvalidValue(f"--{name}={shown_value(value)} is no number; use one, as {default}.")
        return value

    def one_of(self, name: str, *choices: str) -> str:
        """One of some words, the first of which is the default.

        Raises:
            MissingRule: another word, which has no rule.
        """
        value = str(self.given.get(name, choices[0]))
        if value not in choices:
            raise MissingRule(
                f"--{name} {shown_value(value)} has no rule in the Megatron engine; use "
                f"{' or '.join(choices)}.",
                kind=f"Megatron's --{name}",
            )
        return value

    @property
    def tp(self) -> int:
        """`tensor_model_parallel_size`."""
        return self.count("tensor-model-parallel-size", 1)

    @property
    def pp(self) -> int:
        """`pipeline_model_parallel_size`."""
        return self.count("pipeline-model-parallel-size", 1)

    @property
    def ffn_hidden_size(self) -> int:
        """Left out: four times the hidden size, of which SwiGLU takes two thirds, in multiples of 64."""
        hidden = self.count("hidden-size")
        usual = int((4 * hidden * 2 / 3) / 64) * 64 if self.flag("swiglu") else 4 * hidden
        return self.count("ffn-hidden-size", usual)

    @property
    def model(self) -> GPTModel:
        """The model that the arguments describe."""
        n_heads, hidden = self.count("num-attention-heads"), self.count("hidden-size")
        hidden_dropout = self.number("hidden-dropout", 0.1)
        grouped, mla = self.flag("group-query-attention"), self.mla
        if mla and grouped:
            raise PlanRefused(
                "Group query attention is mutually exclusive with multi latent attention; leave out "
                "--group-query-attention.",
                kind="grouped queries of multi-latent attention",
            )
        seq_len = self.count("seq-length")
        kind: dict[str, Any] = {"name": "Megatron GPT"}
        if self.is_bert:
            kind = {"name": "Megatron BERT", "binary_head": not self.flag("bert-no-binary-head")}
        return (BertModel if self.is_bert else GPTModel)(
            **kind,
            d_model=hidden,
            max_seq_len=self.count("max-position-embeddings", seq_len),
            n_layers=self.count("num-layers"),
            n_heads=n_heads,
            n_kv_heads=self.count("num-query-groups", 1) if grouped else n_heads,
            d_head=mla.width if mla else self.count("kv-channels", hidden // n_heads),
            d_ff=self.ffn_hidden_size,
            vocab_size=self.count("pad-vocab-size-to", self.count("vocab-size", 0))
            or self.count("vocab-size"),
            tied_head=not self.flag("untie-embeddings-and-output-weights"),
            dropout=hidden_dropout,
            attention_dropout=self.number("attention-dropout", 0.1),
            normalization=self.one_of("normalization", "LayerNorm", "RMSNorm"),
            swiglu=self.flag("swiglu"),
            add_bias_linear=not self.flag("disable-bias-linear"),
            add_qkv_bias=self.flag("add-qkv-bias"),
            position_embedding_type=self.one_of("position-embedding-type", *POSITIONS),
            embed_layernorm=self.flag("embed-layernorm"),
            rotary_percent=self.number("rotary-percent", 1.0),
            rope_fusion=not self.flag("no-rope-fusion"),
            qk_layernorm=self.flag("qk-layernorm"),
            mla=mla,
            mtp_num_layers=self.count("mtp-num-layers", 0),
            moe=self.moe if self.flag("num-experts") else None,
        )

    @property
    def mla(self) -> MLA | None:
        """Multi-latent attention, if it is asked for."""
        if not self.flag("multi-latent-attention"):
            return None
        sizes = MLA._field_defaults
        return MLA(**{name: self.count(name.replace("_", "-"), sizes[name]) for name in sizes})

    @property
    def moe(self) -> MoE:
        """The mixture of experts of each layer that has one.

        Raises:
            MissingRule: a router or experts without a rule.
        """
        if not self.flag("disable-bias-linear"):
            raise MissingRule("--num-experts without --disable-bias-linear has no rule; add it.")
        if not (self.flag("swiglu") or self.flag("no-bias-gelu-fusion")):
            raise MissingRule(
                "--num-experts with GELU: Megatron fuses only SwiGLU with the weights of a router; add "
                "--no-bias-gelu-fusion, or --swiglu."
            )
        return MoE(
            num_experts=self.count("num-experts"),
            ffn_hidden_size=self.count("moe-ffn-hidden-size", self.ffn_hidden_size),
            router_topk=self.count("moe-router-topk", 2),
            layer_freq=self._layer_freq(),
            shared_expert_intermediate_size=self.count("moe-shared-expert-intermediate-size", 0),
            router_load_balancing_type=self.one_of("moe-router-load-balancing-type", *LOAD_BALANCING),
            aux_loss_coeff=self.number("moe-aux-loss-coeff", 0.0),
            router_score_function=self.one_of("moe-router-score-function", "softmax", "sigmoid"),
            router_pre_softmax=self.flag("moe-router-pre-softmax"),
            router_enable_expert_bias=self.flag("moe-router-enable-expert-bias"),
            router_in_fp32="moe-router-dtype" in self.given
            and self.one_of("moe-router-dtype", "fp32") == "fp32",
        )

    def _layer_freq(self) -> tuple[int, ...]:
        """For each layer whether it has experts: every n-th one from the first, or a list as "[0]*3+[1]*13".

        Source: megatron.core.transformer.moe.moe_utils, megatron.core.models.gpt.gpt_layer_specs.
        """
        n_layers, said = self.count("num-layers"), str(self.given.get("moe-layer-freq", 1)).strip("()\"' ")
        if said.isdecimal() and int(said):
            return tuple([int(i % int(said) == 0) for i in range(n_layers)])
        terms = [
            re.fullmatch(r"\[([01](?:,[01])*)\](?:\*(\d+))?", term)
            for term in said.replace(" ", "").split("+")
        ]
        found = [int(one) for term in terms if term for one in term[1].split(",") * int(term[2] or 1)]
        if None in terms or len(found) != n_layers:
            raise InvalidValue(
                f"--moe-layer-freq {shown_value(said)} gives no 0 or 1 for each of {n_layers} layers; use "
                "a number n, for every n-th layer, or a list as [0]*3+[1]*13."
            )
        return tuple(found)

    @property
    def keywords(self) -> dict[str, Any]:
        """The plan and the engine's options, as keywords of `memplan.estimate`; `dp` is left out."""
        found = {"engine": "megatron", **self._plan(), **self._options()}
        return found | self._pipeline() | self._recomputation()

    def _plan(self) -> dict[str, Any]:
        precision = "bf16-mixed" if self.flag("bf16") else "fp16-mixed" if self.flag("fp16") else "fp32"
        optimizer = self.one_of("optimizer", "adam", "muon")
        zero = int(self.flag("use-distributed-optimizer"))
        return {
            **({} if optimizer == "adam" else {"optimizer": optimizer}),
            "tp": self.tp,
            "pp": self.pp,
            "cp": self.count("context-parallel-size", 1),
            "ep": self.count("expert-model-parallel-size", 1),
            "etp": self.count("expert-tensor-parallel-size", self.tp) if self.flag("num-experts") else 1,
            "zero": self.count("zero-stage", 1) if self.flag("deepspeed") else zero,
            "sequence_parallel": self.flag("sequence-parallel") and self.tp > 1,
            "micro_batch": self.count("micro-batch-size"),
            "global_batch": self.count("global-batch-size", 0) or None,
            "seq_len": self.count("seq-length"),
            "precision": precision,
            "clip_grad_norm": self.number("clip-grad", 1.0) or None,
        }

    def _options(self) -> dict[str, Any]:
        named: dict[str, Callable[[str], Any]] = {
            "hierarchical-context-parallel-sizes": _numbers, "cp-comm-type": str,
            "transformer-impl": str, "attention-backend": str, "cross-entropy-fusion-impl": str,
            "main-grads-dtype": str, "exp-avg-dtype": str, "exp-avg-sq-dtype": str,
            "ddp-bucket-size": count_or_text, "make-vocab-size-divisible-by": count_or_text,
            "microbatch-group-size-per-virtual-pipeline-stage": count_or_text,
            "num-distributed-optimizer-instances": count_or_text,
            "fp8-format": str, "fp8-recipe": str, "fp8-amax-history-len": count_or_text,
        }  # fmt: skip
        flags = (
            "overlap-grad-reduce", "overlap-param-gather", "cross-entropy-loss-fusion", "deterministic-mode",
            "accumulate-allreduce-grads-in-fp32", "overlap-param-gather-with-optimizer-step",
            "moe-permute-fusion", "use-precision-aware-optimizer", "defer-embedding-wgrad-compute",
            "fp8-param-gather", "first-last-layers-bf16", "tp-comm-overlap",
        )  # fmt: skip
        found: dict[str, Any] = {
            name.replace("-", "_"): read(self.given[name])
            for name, read in named.items()
            if name in self.given
        }
        found |= {name.replace("-", "_"): True for name in flags if self.flag(name)}
        if limit := self.count("wgrad-deferral-limit", 0):
            found["wgrad_deferral_limit"] = limit
        if self.flag(PADDING) or self.flag(PADDING_FOR_FP8):
            found["moe_router_padding_for_quantization"] = True
        if self.flag(WARMUP_FLUSH):
            found["overlap_p2p_comm_warmup_flush"] = True
        if self.flag("num-experts"):
            found["moe_grouped_gemm"] = self.flag("moe-grouped-gemm")
            found["moe_token_dispatcher_type"] = self.one_of("moe-token-dispatcher-type", *DISPATCHERS)
        for name in (
            "gradient-accumulation-fusion",
            "masked-softmax-fusion",
            "create-attention-mask-in-dataloader",
            "use-layer-wise-param-layout",
        ):
            if self.flag(f"no-{name}"):
                found[name.replace("-", "_")] = False
        if self.flag("deepspeed"):
            found |= {"megatron_deepspeed": True, "transformer_impl": "local"}
            found["gradient_accumulation_fusion"] = False
        if any(self.flag(name) for name in IN_FP32):
            found["attention_softmax_in_fp32"] = True
        if self.flag("spec") and self.one_of("spec", "local"):
            found["transformer_impl"] = "local"
        if found.get("attention_backend") == "local":
            found["attention_backend"] = "auto"
        if WORKSPACES in self.environment:
            found["cublas_workspace_config"] = self.environment[WORKSPACES]
        return found

    def _pipeline(self) -> dict[str, Any]:
        """The layers of each stage, and the schedule.

        Source: megatron.core.transformer.transformer_block:get_num_layers_to_build.
        """
        layers, pp = self.count("num-layers"), self.pp
        found: dict[str, Any] = {}
        virtual = self.count("num-virtual-stages-per-pipeline-rank", 0)
        if per_stage := self.count("num-layers-per-virtual-pipeline-stage", 0):
            virtual = layers // pp // per_stage
        if virtual > 1:
            found |= {"virtual_stages": virtual, "schedule": "interleaved-1f1b"}
        first = self.count("decoder-first-pipeline-num-layers", 0)
        last = self.count("decoder-last-pipeline-num-layers", 0)
        ends = (
            self.flag("account-for-embedding-in-pipeline-split"),
            self.flag("account-for-loss-in-pipeline-split"),
        )
        if layout := self.given.get("pipeline-model-parallel-layout"):
            stages = self._layout(str(layout))
            virtual, more = divmod(len(stages), pp)
            if more:
                raise InvalidValue(
                    f"--pipeline-model-parallel-layout has {len(stages)} stages, which {pp} ranks do not "
                    "divide; use a multiple."
                )
            found["layers_per_stage"] = stages
            if virtual > 1:
                found |= {"virtual_stages": virtual, "schedule": "interleaved-1f1b"}
        n_stages = pp * max(virtual, 1)
        if self.flag("deepspeed"):
            found["layers_per_stage"] = self._by_deepspeed(layers, pp)
        if any(ends):
            found["layers_per_stage"] = self._with_ends(layers, n_stages, *ends)
        if first or last:
            found["layers_per_stage"] = self._uneven(layers, pp, max(virtual, 1), first, last)
        if "layers_per_stage" not in found and layers % n_stages:
            raise PlanRefused(
                f"Number of layers ({layers}) should be divisible by the stages of the pipeline "
                f"({n_stages}); use --pipeline-model-parallel-layout to divide them unevenly.",
                kind="layers that a pipeline does not divide",
            )
        return found

    def _layout(self, text: str) -> tuple[int, ...]:
        """The decoder layers of each stage of a layout such as "Et*3|(tt|)*28ttmL".

        Source: megatron.core.transformer.pipeline_parallel_layer_layout:PipelineParallelLayerLayout.
        """
        plain = re.sub(r"[\\,\s'\"]", "", text)
        for repeated in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
            plain = re.sub(repeated, lambda found: found[1] * min(int(found[2]), MOST_LAYERS), plain)
        stages, n_more = plain.split("|"), self.count("mtp-num-layers", 0)
        layers = "".join(stages)
        if layers != f"E{'t' * self.count('num-layers')}{'m' * n_more}L" or "m" in "".join(stages[:-1]):
            raise InvalidValue(
                f"--pipeline-model-parallel-layout {shown_value(text)} has no E, "
                f"{self.count('num-layers')} t, {n_more} m and L in this order, with all m in the last "
                "stage; use such a layout."
            )
        return tuple([stage.count("t") for stage in stages])

    def _by_deepspeed(self, layers: int, pp: int) -> tuple[int, ...]:
        """The layers of each stage as DeepSpeed's PipelineModule deals them out: the last one gets the rest.

        Source: deepspeed/runtime/utils.py (`partition_balanced`).
        """
        by_layers, by_both = "type:transformer", "type:transformer|embedding"
        method = str(self.given.get("pp-partition-method", by_layers)).strip("'\"")
        if method not in (by_layers, by_both):
            raise MissingRule(
                f"--pp-partition-method {shown_value(method)} has no rule; use {by_layers} or '{by_both}'."
            )
        ends = method == by_both
        total = layers + 2 * ends
        each = -(-total // pp)
        found = [max(0, min(each, total - i * each)) for i in range(pp)]
        found[0], found[-1] = found[0] - ends, found[-1] - ends
        if min(found) < 1:
            raise PlanRefused(
                f"DeepSpeed deals {layers} layers out as {found}, and breaks on a stage without one; use "
                "another --num-layers.",
                kind="a stage of DeepSpeed's pipeline without layers",
            )
        return tuple(found)

    def _with_ends(self, layers: int, n_stages: int, embedding: bool, loss: bool) -> tuple[int, ...]:
        """The layers of each stage where the embedding and the loss count as one layer each."""
        total = layers + embedding + loss
        if total % n_stages:
            raise InvalidValue(
                f"{total} layers, the embedding and the loss counted, cannot be divided over {n_stages} "
                "stages; choose a --num-layers that makes it a multiple."
            )
        each = total // n_stages
        return each - embedding, *[each] * (n_stages - 2), each - loss

    def _uneven(self, layers: int, pp: int, virtual: int, first: int, last: int) -> tuple[int, ...]:
        """The layers of each stage where the first or the last rank has another number of them."""
        ranks = pp - bool(first) - bool(last)
        each = (layers - first - last) // max(ranks, 1)
        of_rank = [first or each, *[each] * (pp - 2), last or each]
        if any(n % virtual for n in of_rank) or sum(of_rank) != layers:
            raise InvalidValue(
                f"--num-layers {layers} cannot be divided as {of_rank} over the ranks, each in {virtual} "
                "equal stages; choose other numbers."
            )
        return tuple([n // virtual for n in of_rank] * virtual)

    def _recomputation(self) -> dict[str, Any]:
        if self.flag("checkpoint-activations"):
            if self.count("checkpoint-num-layers", 1) > 1:
                raise MissingRule("--checkpoint-num-layers has no rule beyond 1; leave it out.")
            return {"recompute": "full"}
        if "recompute-granularity" not in self.given:
            return {}
        if self.one_of("recompute-granularity", "full", "selective") == "selective":
            return {"recompute": "selective", **self._recompute_modules()}
        method, n = self.given.get("recompute-method"), self.count("recompute-num-layers", 1)
        if method == "block":
            return {"recompute": "full", "recompute_blocks": n}
        if n > 1:
            raise MissingRule(
                f"--recompute-num-layers {n} under --recompute-method uniform has no rule; use 1."
            )
        return {"recompute": "full"}

    def _recompute_modules(self) -> dict[str, Any]:
        if "recompute-modules" not in self.given:
            return {}
        names = str(self.given["recompute-modules"]).strip("[]").replace(",", " ").split()
        return {"recompute_modules": ",".join(names)}

    @property
    def notes(self) -> list[str]:
        """What is taken for granted."""
        unread = "--deepspeed_config is not read: its stage is --zero-stage, its buckets DeepSpeed's usual."
        return [unread] if self.flag("deepspeed") else []


MEGATRON: Final = Megatron()
