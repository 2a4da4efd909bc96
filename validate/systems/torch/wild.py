"""Other people's modules as they are, under a plan: transformers', torchvision's, and a few of everyone's.

Their traces are in `data/traces`, a preset's with memplan, written by `python -m validate.traces`.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from itertools import groupby
from operator import itemgetter
from typing import Any, Final, cast
from unittest.mock import patch
from warnings import catch_warnings, simplefilter

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.checkpoint import checkpoint

import memplan
from memplan import Plan, TracedModel
from memplan.engines.torch.options import torch_options
from memplan.errors import PlanRefused, unknown_name
from memplan.models import Decoder
from memplan.models.config import Config
from memplan.models.config_of import config_of
from memplan.models.traced import is_of_torchtitan, modules_with
from memplan.plan import Rank
from memplan.shapes import FP32
from memplan.tracing.context import as_trainer_divides, divided_sequences
from memplan.tracing.divided import by_plan_of_transformers, dealt_out, is_of_experts
from memplan.tracing.torchtitan import kept_contexts, token_loss
from memplan.tracing.torchtitan_mixtures import mixture_of
from validate.cases import Divided
from validate.standin import materialised
from validate.systems.torch.adapters import with_adapters
from validate.systems.torch.architectures import is_architecture, small_module
from validate.systems.torch.compiled import compile_blocks
from validate.systems.torch.lightning_demo import LightningDemo, texts
from validate.systems.torch.masks import constants_known, known_inputs
from validate.systems.torch.parallelize import (
    checkpoint_of,
    fsdp_options,
    fully_sharded,
    in_float8,
    replicated,
    shard_weights,
    torch_dtype,
    units_of_blocks,
)
from validate.systems.torch.passes import Passes, syncing
from validate.systems.torch.torchtitan import (
    OF_TORCHTITAN,
    mixture_inputs,
    mixture_stage,
    mixture_trace,
)
from validate.systems.torch.wild_stages import (
    POSITIONS,
    VOCABULARY,
    WIDTH,
    autocast,
    loss_of_output,
    wild_pipeline,
    wild_stage,
)

N_CLASSES: Final = 10
IMAGE: Final = 32
"""Rows and columns of an image."""

Inputs = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wild:
    """A module of someone else's: how it is made, and what it is called with.

    `inputs` makes the inputs for a number of samples and tokens; one named `targets` is for the loss only
    (`loss_of`). A module of true size is for a GPU, with a micro-batch of `gpu_batch`; `context` is its
    trained length, where that is longer than `seq_len`.
    """

    module: Callable[[], nn.Module]
    inputs: Callable[[int, int, torch.Generator], Inputs]
    seq_len: int = 1
    package: str = "torch"
    gpu_batch: int | None = None
    context: int | None = None


def inputs_over(cp: int, drawn: Inputs) -> Inputs:
    """What a module is called with over context-parallel ranks: of transformers as Trainer calls it."""
    return as_trainer_divides(drawn) if cp > 1 and "input_ids" in drawn else drawn


def loss_of(module: nn.Module, inputs: Inputs) -> Tensor:
    """The loss as most people compute it: the model's own, or cross-entropy with the targets."""
    called = {name: value for name, value in inputs.items() if name != "targets"}
    output = module(**called)
    if "targets" not in inputs:
        return cast(Tensor, output.loss)
    loss = token_loss if POSITIONS in inputs else loss_of_output
    return loss(output, inputs["targets"])


# --- transformers ---

WIDTHS: Final = {
    "hidden_size": WIDTH,
    "intermediate_size": 176,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""The sizes of most of them."""

NO_DROPOUT: Final = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

GROUPED: Final = {**WIDTHS, "num_key_value_heads": 2}

LANGUAGE: Final[dict[str, tuple[str, str, dict[str, Any]]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "mistral": ("MistralForCausalLM", "MistralConfig", GROUPED),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", GROUPED),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**GROUPED, "head_dim": 16}),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {**GROUPED, "head_dim": 16}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**GROUPED, "head_dim": 16}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**GROUPED, "head_dim": 16}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", GROUPED),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", GROUPED),
    "starcoder2": ("Starcoder2ForCausalLM", "Starcoder2Config", GROUPED),
    "cohere": ("CohereForCausalLM", "CohereConfig", GROUPED),
    "gpt-neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", WIDTHS),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**GROUPED, "num_local_experts": 4}),
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**GROUPED, "head_dim": 16, "moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 3},
    ),
    "gpt-oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {**GROUPED, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 32},
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 128, "vocab_size": VOCABULARY,
         "bos_token_id": 1, "eos_token_id": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        {**WIDTHS, "ffn_dim": 256, "word_embed_proj_dim": 64, "dropout": 0.0},
    ),
    "gpt2-untied": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 128, "vocab_size": VOCABULARY,
         "bos_token_id": 1, "eos_token_id": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
         "tie_word_embeddings": False},
    ),
    "bloom": (
        "BloomForCausalLM",
        "BloomConfig",
        {"hidden_size": 64, "n_layer": 4, "n_head": 4, "vocab_size": VOCABULARY},
    ),
    "bert": (
        "BertForMaskedLM",
        "BertConfig",
        {**WIDTHS, **NO_DROPOUT},
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"d_model": WIDTH, "d_ff": 176, "d_kv": 16, "num_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY,
         "decoder_start_token_id": 0, "dropout_rate": 0.0},
    ),
    "bart": (
        "BartForConditionalGeneration",
        "BartConfig",
        {"d_model": WIDTH, "encoder_ffn_dim": 176, "decoder_ffn_dim": 176, "encoder_layers": 2,
         "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "dropout": 0.0,
         "vocab_size": VOCABULARY, "max_position_embeddings": 128},
    ),
    "roberta": (
        "RobertaForMaskedLM",
        "RobertaConfig",
        {**WIDTHS, **NO_DROPOUT, "max_position_embeddings": 130},
    ),
}  # fmt: skip
"""Class, class of its configuration, and sizes."""


def _language(model: str, config: str, sizes: Mapping[str, Any], **more: Any) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        transformers = import_module("transformers")
        settings = getattr(transformers, config)(**sizes, **more)
        return cast(nn.Module, getattr(transformers, model)(settings))

    return made


def _tokens(samples: int, seq_len: int, generator: torch.Generator) -> Inputs:
    ids = torch.randint(3, VOCABULARY, (samples, seq_len), generator=generator)
    return {"input_ids": ids, "labels": ids}


def _speech(samples: int, seq_len: int, generator: torch.Generator) -> Inputs:
    heard = torch.randn(samples, 20, 100, generator=generator)
    return {
        "input_features": heard,
        "labels": torch.randint(3, VOCABULARY, (samples, seq_len), generator=generator),
    }


OF_IMAGES: Final = {
    **{name: WIDTHS[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads")},
    "num_hidden_layers": 4,
    "image_size": IMAGE,
    "patch_size": 8,
}

_vit = _language("ViTForImageClassification", "ViTConfig", OF_IMAGES, num_labels=N_CLASSES)

_clip = _language(
    "CLIPForImageClassification", "CLIPConfig", {"vision_config": OF_IMAGES}, num_labels=N_CLASSES
)
"""CLIP's images, whose last norm gets no gradient."""

_siglip = _language(
    "SiglipForImageClassification", "SiglipConfig", {"vision_config": OF_IMAGES}, num_labels=N_CLASSES
)
"""SigLIP's images, whose last unit is called, and its output used by nobody."""


PIECES: Final = (IMAGE // OF_IMAGES["patch_size"]) ** 2
"""Tokens that stand for an image."""


def _image_and_text(
    samples: int,
    seq_len: int,
    generator: torch.Generator,
    size: int = IMAGE,
    pieces: int = PIECES,
    vocabulary: int = VOCABULARY,
) -> Inputs:
    """Sequences that begin with an image; the last token of the vocabulary stands for one of its pieces."""
    image = torch.full((samples, pieces), vocabulary - 1)
    text = torch.randint(3, vocabulary - 1, (samples, seq_len - pieces), generator=generator)
    ids = torch.cat([image, text], 1)
    images = torch.randn(samples, 3, size, size, generator=generator)
    return {"input_ids": ids, "labels": ids.clone(), "pixel_values": images}


def _typed_image_and_text(samples: int, seq_len: int, generator: torch.Generator, **sizes: int) -> Inputs:
    """The same for PaliGemma, which is told which tokens are text."""
    inputs = _image_and_text(samples, seq_len, generator, **sizes)
    ids = inputs["input_ids"]
    return {**inputs, "token_type_ids": (ids != ids[0, 0]).long()}


OF_PATCHES: Final = {"depth": 4, "num_heads": 4, "patch_size": 4, "temporal_patch_size": 2}
OF_THREE_AXES: Final = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10_000.0}
"""Positions along time, rows and columns, for heads of 16."""

GRID: Final = (8, 8)
"""Rows and columns of patches in an image that is cut into patches, of which four become one token."""


def _patches_and_text(
    samples: int,
    seq_len: int,
    generator: torch.Generator,
    grid: tuple[int, int] = GRID,
    width: int = 3 * 2 * 4**2,
    vocabulary: int = VOCABULARY,
) -> Inputs:
    """Sequences that begin with an image cut into patches, as the processors of Qwen2-VL and others do it."""
    rows, columns = grid
    inputs = _image_and_text(samples, seq_len, generator, 1, rows * columns // 4, vocabulary)
    return {
        **inputs,
        "mm_token_type_ids": (inputs["input_ids"] == vocabulary - 1).long(),
        "pixel_values": torch.randn(samples * rows * columns, width, generator=generator),
        "image_grid_thw": torch.tensor([[1, rows, columns]]).repeat(samples, 1),
    }


def _labelled_images(samples: int, _seq_len: int, generator: torch.Generator, size: int = IMAGE) -> Inputs:
    images = torch.randn(samples, 3, size, size, generator=generator)
    return {"pixel_values": images, "labels": torch.randint(N_CLASSES, (samples,), generator=generator)}


# --- Frozen in part ---

RANK: Final = 8
"""Columns of LoRA's two factors."""

LEVELS: Final = 16
"""Values of a weight of four bits."""


class LoraLinear(nn.Module):
    """A frozen linear layer and a trained product of two thin matrices beside it (arXiv:2106.09685)."""

    def __init__(self, base: nn.Module, n_in: int, n_out: int) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Linear(n_in, RANK, bias=False)
        self.b = nn.Linear(RANK, n_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.base(x) + 2.0 * self.b(self.a(x)))


class WideLoraLinear(LoraLinear):
    """The same beside a base in a narrow type, as PEFT computes it: the trained product in its own type."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        return cast(Tensor, (y + 2.0 * self.b(self.a(x.to(self.a.weight.dtype)))).to(y.dtype))


class OwnCheckpoints(nn.Module):
    """Layers that the module itself recomputes, after one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(Mlp() for _ in range(4))
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.tokens(x))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return cast(Tensor, self.head(x))


class Mlp(nn.Module):
    """Two layers and what is between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, x + self.down(F.gelu(self.up(x))))


class FourBitLinear(nn.Module):
    """A linear layer with weights of four bits, which become floats when they are used (arXiv:2305.14314)."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        scale = weight.abs().amax(1, keepdim=True)
        bits = ((weight / scale + 1) / 2 * (LEVELS - 1)).round().to(torch.uint8)
        self.packed = nn.Parameter(bits[:, ::2] * LEVELS + bits[:, 1::2], requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        bits = torch.stack([self.packed // LEVELS, self.packed % LEVELS], -1).flatten(1)
        return F.linear(x, (bits.to(x.dtype) * (2 / (LEVELS - 1)) - 1) * self.scale.to(x.dtype))


def _lora(model: str, *, quantized: bool = False, narrow: bool = False) -> Callable[[], nn.Module]:
    """A language model whose own weights are frozen, beside whose linear layers others are trained.

    `narrow`: its own weights are in bfloat16, and those beside them in float32.
    """
    of_language = _language(*LANGUAGE[model], use_cache=False)

    def made() -> nn.Module:
        module = of_language().requires_grad_(False)
        module.to(torch.bfloat16 if narrow else torch.float32)
        kind = WideLoraLinear if narrow else LoraLinear
        blocks = module.get_submodule("model.layers")
        for name, one in list(blocks.named_modules()):
            if isinstance(one, nn.Linear):
                base = FourBitLinear(one) if quantized else one
                blocks.set_submodule(name, kind(base, one.in_features, one.out_features))
        return module

    return made


def _peft(model: str) -> Callable[[], nn.Module]:
    """The same by PEFT itself: a base in bfloat16, and adapters that PEFT makes in float32."""
    of_language = _language(*LANGUAGE[model], use_cache=False)

    def made() -> nn.Module:
        peft = import_module("peft")
        asked = peft.LoraConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM")
        with catch_warnings():
            simplefilter("ignore", FutureWarning)  # of a property that transformers renames
            return cast(nn.Module, peft.get_peft_model(of_language().to(torch.bfloat16), asked))

    return made


def _probe(whole: Callable[[], nn.Module], base: str) -> Callable[[], nn.Module]:
    """A model of which all but the head is frozen."""

    def made() -> nn.Module:
        module = whole()
        module.get_submodule(base).requires_grad_(False)
        return module

    return made


def _classifier() -> nn.Module:
    transformers = import_module("transformers")
    settings = transformers.BertConfig(**WIDTHS, **NO_DROPOUT, num_labels=N_CLASSES, classifier_dropout=0.0)
    return cast(nn.Module, transformers.BertForSequenceClassification(settings))


def _labelled_text(samples: int, seq_len: int, generator: torch.Generator) -> Inputs:
    ids = torch.randint(3, VOCABULARY, (samples, seq_len), generator=generator)
    return {"input_ids": ids, "labels": torch.randint(N_CLASSES, (samples,), generator=generator)}


# --- torchvision and everyone's own ---


def _resnet(depth: int, n_classes: int = N_CLASSES) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        models = import_module("torchvision.models")
        return cast(nn.Module, getattr(models, f"resnet{depth}")(num_classes=n_classes))

    return made


def _images(samples: int, _seq_len: int, generator: torch.Generator, size: int = IMAGE) -> Inputs:
    images = torch.randn(samples, 3, size, size, generator=generator)
    return {"x": images, "targets": torch.randint(N_CLASSES, (samples,), generator=generator)}


class Recurrent(nn.Module):
    """A language model of two LSTM layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 64)
        self.lstm = nn.LSTM(64, 64, num_layers=2, batch_first=True)
        self.head = nn.Linear(64, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.head(self.lstm(self.embedding(x))[0]))


def _next_tokens(samples: int, seq_len: int, generator: torch.Generator) -> Inputs:
    text = torch.randint(VOCABULARY, (samples, seq_len + 1), generator=generator)
    return {"x": text[:, :-1].clone(), "targets": text[:, 1:].clone()}


class UNet(nn.Module):
    """Down and up again over two scales, with the finer scale's features handed across."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.SiLU())
        self.down = nn.Conv2d(32, 64, 3, stride=2, padding=1)
        self.middle = nn.Sequential(nn.GroupNorm(8, 64), nn.SiLU(), nn.Conv2d(64, 64, 3, padding=1))
        self.up = nn.Conv2d(96, 32, 3, padding=1)
        self.last = nn.Conv2d(32, N_CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.first(x)
        coarse = self.middle(self.down(fine))
        joined = torch.cat([fine, F.interpolate(coarse, scale_factor=2.0)], dim=1)
        return cast(Tensor, self.last(F.silu(self.up(joined))).mean((2, 3)))


class TwoTowers(nn.Module):
    """Two networks side by side, whose outputs are multiplied, as in recommendation."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 64))
        self.item = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 64))

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return cast(Tensor, self.user(user) @ self.item(item).transpose(0, 1))


def _pairs(samples: int, _seq_len: int, generator: torch.Generator) -> Inputs:
    return {
        "user": torch.randn(samples, 256, generator=generator),
        "item": torch.randn(samples, 128, generator=generator),
        "targets": torch.arange(samples),
    }


class Encoder(nn.Module):
    """PyTorch's own transformer layers, four of them."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 176, dropout=0.0, batch_first=True)
        self.embedding = nn.Embedding(VOCABULARY, 64)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(64, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.head(self.layers(self.embedding(x))))


# --- At true size ---


OF_EXPERTS: Final = ("Mixtral", "Qwen3Moe", "GptOss", "Glm4Moe")


def _llama_like(name: str, batch: int, seq_len: int, **sizes: Any) -> Wild:
    """A language model of transformers with the sizes of a published config.json."""
    made = _language(f"{name}ForCausalLM", f"{name}Config", _widths(**sizes), use_cache=False)
    context = (
        sizes.get("max_position_embeddings") if "num_experts_per_tok" in sizes or name == "Mixtral" else None
    )
    return Wild(
        module=made, inputs=_tokens, seq_len=seq_len, package="transformers", gpu_batch=batch, context=context
    )


def _widths(*, width: int, ff: int, layers: int, heads: int, vocabulary: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": width, "intermediate_size": ff, "num_hidden_layers": layers,
        "num_attention_heads": heads, "vocab_size": vocabulary, **more,
    }  # fmt: skip


def _of_images(model: str, config: str, sizes: Mapping[str, Any]) -> Wild:
    return Wild(
        module=_language(model, config, sizes, num_labels=1000),
        inputs=partial(_labelled_images, size=224),
        package="transformers",
        gpu_batch=64,
    )


def _of_qwen_vl(
    release: str, seq_len: int, of_images: dict[str, Any], of_text: dict[str, Any], *, gpu_batch: int
) -> Wild:
    """A Qwen2-VL or Qwen2.5-VL at true size, with an image of 448 x 448 pixels in each sequence."""
    vocabulary = 151_936
    rope = {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1_000_000.0}
    tied = {"tie_word_embeddings": True}
    text = {**of_text, "vocab_size": vocabulary, **tied, "rope_parameters": rope, "use_cache": False}
    sizes = {"vision_config": of_images, "text_config": text, **tied, "image_token_id": vocabulary - 1}
    how = f"Qwen{release}VLForConditionalGeneration", f"Qwen{release}VLConfig"
    inputs = partial(_patches_and_text, grid=(32, 32), width=3 * 2 * 14**2, vocabulary=vocabulary)
    return Wild(
        module=_language(*how, sizes, use_cache=False),
        inputs=inputs,
        seq_len=seq_len,
        package="transformers",
        gpu_batch=gpu_batch,
    )


AT_TRUE_SIZE: Final[Mapping[str, Wild]] = {
    "llama-3-8b": _llama_like(
        "Llama", 1, 4096, width=4096, ff=14_336, layers=32, heads=32, vocabulary=128_256,
        num_key_value_heads=8, max_position_embeddings=8192,
    ),
    "qwen2.5-7b": _llama_like(
        "Qwen2", 1, 4096, width=3584, ff=18_944, layers=28, heads=28, vocabulary=152_064,
        num_key_value_heads=4, max_position_embeddings=131_072,
    ),
    "qwen3-8b": _llama_like(
        "Qwen3", 1, 4096, width=4096, ff=12_288, layers=36, heads=32, vocabulary=151_936,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=40_960,
    ),
    "qwen3-30b-a3b": _llama_like(
        "Qwen3Moe", 1, 4096, width=2048, ff=6144, layers=48, heads=32, vocabulary=151_936,
        num_key_value_heads=4, head_dim=128, max_position_embeddings=40_960,
        moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True,
    ),
    "mixtral-8x7b": _llama_like(
        "Mixtral", 1, 4096, width=4096, ff=14_336, layers=32, heads=32, vocabulary=32_000,
        num_key_value_heads=8, sliding_window=None, max_position_embeddings=32_768,
    ),
    "mistral-7b": _llama_like(
        "Mistral", 1, 4096, width=4096, ff=14_336, layers=32, heads=32, vocabulary=32_768,
        num_key_value_heads=8, sliding_window=None, max_position_embeddings=32_768,
    ),
    "gemma-2-9b": _llama_like(
        "Gemma2", 1, 2048, width=3584, ff=14_336, layers=42, heads=16, vocabulary=256_000,
        num_key_value_heads=8, head_dim=256, sliding_window=4096, max_position_embeddings=8192,
    ),
    "olmo2-7b": _llama_like(
        "Olmo2", 1, 4096, width=4096, ff=11_008, layers=32, heads=32, vocabulary=100_352,
        num_key_value_heads=32, max_position_embeddings=4096,
    ),
    "phi3-mini": _llama_like(
        "Phi3", 2, 4096, width=3072, ff=8192, layers=32, heads=32, vocabulary=32_064,
        num_key_value_heads=32, max_position_embeddings=4096,
    ),
    "pythia-6.9b": _llama_like(
        "GPTNeoX", 2, 2048, width=4096, ff=16_384, layers=32, heads=32, vocabulary=50_432,
        max_position_embeddings=2048,
    ),
    "gpt2-xl": Wild(
        module=_language(
            "GPT2LMHeadModel", "GPT2Config", {"n_embd": 1600, "n_layer": 48, "n_head": 25}, use_cache=False
        ),
        inputs=_tokens, seq_len=1024, package="transformers", gpu_batch=4,
    ),
    "llava-1.5-7b": Wild(
        module=_language(
            "LlavaForConditionalGeneration", "LlavaConfig",
            {"vision_config": {"model_type": "clip_vision_model", "hidden_size": 1024, "image_size": 336,
                               "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 24,
                               "patch_size": 14, "projection_dim": 768},
             "text_config": {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32_064,
                             "use_cache": False},
             "image_token_index": 32_063},
            use_cache=False,
        ),
        inputs=partial(_image_and_text, size=336, pieces=576, vocabulary=32_064),
        seq_len=2048, package="transformers", gpu_batch=2,
    ),
    "paligemma-3b": Wild(
        module=_language(
            "PaliGemmaForConditionalGeneration", "PaliGemmaConfig",
            {"vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152, "image_size": 224,
                               "intermediate_size": 4304, "num_attention_heads": 16, "num_hidden_layers": 27,
                               "patch_size": 14, "vision_use_head": False},
             "text_config": {"model_type": "gemma", "vocab_size": 257_216, "num_hidden_layers": 18,
                             "num_key_value_heads": 1, "head_dim": 256, "hidden_size": 2048,
                             "num_attention_heads": 8, "intermediate_size": 16_384, "use_cache": False},
             "projection_dim": 2048, "image_token_index": 257_215},
            use_cache=False,
        ),
        inputs=partial(_typed_image_and_text, size=224, pieces=256, vocabulary=257_216),
        seq_len=1024, package="transformers", gpu_batch=2,
    ),
    "qwen2.5-vl-3b": _of_qwen_vl(
        "2_5_", 1024,
        {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "patch_size": 14,
         "out_hidden_size": 2048, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31]},
        {"hidden_size": 2048, "intermediate_size": 11_008, "num_hidden_layers": 36, "num_attention_heads": 16,
         "num_key_value_heads": 2, "max_position_embeddings": 128_000},
        gpu_batch=1,
    ),
    "qwen2-vl-2b": _of_qwen_vl(
        "2", 2048,
        {"depth": 32, "embed_dim": 1280, "hidden_size": 1536, "mlp_ratio": 4, "num_heads": 16,
         "patch_size": 14},
        {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
         "num_key_value_heads": 2, "max_position_embeddings": 32_768},
        gpu_batch=2,
    ),
    "bert-large": Wild(
        module=_language(
            "BertForMaskedLM", "BertConfig",
            _widths(width=1024, ff=4096, layers=24, heads=16, vocabulary=30_522),
        ),
        inputs=_tokens, seq_len=512, package="transformers", gpu_batch=16,
    ),
    "roberta-large": Wild(
        module=_language(
            "RobertaForMaskedLM", "RobertaConfig",
            _widths(width=1024, ff=4096, layers=24, heads=16, vocabulary=50_265, max_position_embeddings=514),
        ),
        inputs=_tokens, seq_len=512, package="transformers", gpu_batch=16,
    ),
    "vit-l": _of_images(
        "ViTForImageClassification", "ViTConfig",
        {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16},
    ),
    "resnet-50": Wild(
        module=_resnet(50, 1000), inputs=partial(_images, size=224), package="torchvision", gpu_batch=256,
    ),
}  # fmt: skip
"""Published models, with the sizes of their own config.json, that are traced on a GPU that is not there."""

EXPERTS_AS_PUBLISHED: Final[Mapping[str, Wild]] = {
    "deepseek-v3": Wild(
        module=_language("DeepseekV3ForCausalLM", "DeepseekV3Config", {}, use_cache=False),
        inputs=_tokens, seq_len=4096, package="transformers", gpu_batch=1, context=163_840,
    ),
    "gpt-oss-120b": _llama_like(
        "GptOss", 1, 4096, width=2880, ff=2880, layers=36, heads=64, vocabulary=201_088,
        num_key_value_heads=8, head_dim=64, num_local_experts=128, num_experts_per_tok=4, sliding_window=128,
        max_position_embeddings=131_072, pad_token_id=199_999,
    ),
    "gpt-oss-20b": _llama_like(
        "GptOss", 1, 4096, width=2880, ff=2880, layers=24, heads=64, vocabulary=201_088,
        num_key_value_heads=8, head_dim=64, num_local_experts=32, num_experts_per_tok=4, sliding_window=128,
        max_position_embeddings=131_072, pad_token_id=199_999,
    ),
    "glm-4.5": _llama_like(
        "Glm4Moe", 1, 4096, width=5120, ff=12_288, layers=92, heads=96, vocabulary=151_552,
        num_key_value_heads=8, head_dim=128, moe_intermediate_size=1536, n_routed_experts=160,
        num_experts_per_tok=8, n_shared_experts=1, first_k_dense_replace=3, attention_bias=True,
        use_qk_norm=True, max_position_embeddings=131_072, pad_token_id=151_329,
    ),
    "glm-4.5-air": _llama_like(
        "Glm4Moe", 1, 4096, width=4096, ff=10_944, layers=46, heads=96, vocabulary=151_552,
        num_key_value_heads=8, head_dim=128, moe_intermediate_size=1408, n_routed_experts=128,
        num_experts_per_tok=8, n_shared_experts=1, first_k_dense_replace=1, attention_bias=True,
        use_qk_norm=False, max_position_embeddings=131_072, pad_token_id=151_329,
    ),
}  # fmt: skip
"""Presets of several kinds of blocks, with the sizes of their own config.json; none was run."""

WIDE: Final[Mapping[str, Wild]] = {
    "qwen3-32b": _llama_like(
        "Qwen3", 1, 4096, width=5120, ff=25_600, layers=64, heads=64, vocabulary=151_936,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=40_960,
    ),
    "llama-3-70b": _llama_like(
        "Llama", 1, 4096, width=8192, ff=28_672, layers=80, heads=64, vocabulary=128_256,
        num_key_value_heads=8, max_position_embeddings=8192,
    ),
}  # fmt: skip
"""Published models, with the sizes of their own config.json, that are traced divided alone."""

RUN_BY_OTHERS: Final[Mapping[str, Wild]] = {
    "lightning-demo": Wild(module=LightningDemo, inputs=texts, seq_len=35, gpu_batch=1),
}
"""Modules of which others published what they held, traced as they ran: in float32."""

IN_SMALL: Final[Mapping[str, Wild]] = {
    **{
        f"hf-{name}": Wild(
            module=_language(*how, use_cache=False), inputs=_tokens, seq_len=64, package="transformers"
        )
        for name, how in LANGUAGE.items()
    },
    "hf-vit": Wild(module=_vit, inputs=_labelled_images, package="transformers"),
    "hf-clip": Wild(module=_clip, inputs=_labelled_images, package="transformers"),
    "hf-llama-lora": Wild(module=_lora("llama"), inputs=_tokens, seq_len=64, package="transformers"),
    "hf-llama-qlora": Wild(
        module=_lora("llama", quantized=True), inputs=_tokens, seq_len=64, package="transformers"
    ),
    "hf-bert-probe": Wild(
        module=_probe(_classifier, "bert"), inputs=_labelled_text, seq_len=64, package="transformers"
    ),
    "hf-vit-probe": Wild(module=_probe(_vit, "vit"), inputs=_labelled_images, package="transformers"),
    "resnet-18": Wild(module=_resnet(18), inputs=_images, package="torchvision"),
    "resnet-50-small": Wild(module=_resnet(50), inputs=_images, package="torchvision"),
    "lstm": Wild(module=Recurrent, inputs=_next_tokens, seq_len=32),
    "u-net": Wild(module=UNet, inputs=_images),
    "two-towers": Wild(module=TwoTowers, inputs=_pairs),
    "encoder": Wild(module=Encoder, inputs=_next_tokens, seq_len=64),
    "hf-llava": Wild(
        module=_language(
            "LlavaForConditionalGeneration",
            "LlavaConfig",
            {
                "vision_config": {**OF_IMAGES, "model_type": "clip_vision_model"},
                "text_config": {**GROUPED, "model_type": "llama"},
                "image_token_index": VOCABULARY - 1,
            },
            use_cache=False,
        ),
        inputs=_image_and_text,
        seq_len=64,
        package="transformers",
    ),
    "hf-paligemma": Wild(
        module=_language(
            "PaliGemmaForConditionalGeneration",
            "PaliGemmaConfig",
            {
                "vision_config": {**OF_IMAGES, "model_type": "siglip_vision_model"},
                "text_config": {**GROUPED, "head_dim": 16, "model_type": "gemma"},
                "projection_dim": WIDTH,
                "image_token_index": VOCABULARY - 1,
            },
            use_cache=False,
        ),
        inputs=_typed_image_and_text,
        seq_len=64,
        package="transformers",
    ),
    "hf-qwen2-vl": Wild(
        module=_language(
            "Qwen2VLForConditionalGeneration",
            "Qwen2VLConfig",
            {
                "vision_config": {**OF_PATCHES, "embed_dim": WIDTH, "hidden_size": WIDTH, "mlp_ratio": 2},
                "text_config": {**GROUPED, "rope_parameters": OF_THREE_AXES, "use_cache": False},
                "image_token_id": VOCABULARY - 1,
            },
            use_cache=False,
        ),
        inputs=_patches_and_text,
        seq_len=64,
        package="transformers",
    ),
    "hf-qwen2.5-vl": Wild(
        module=_language(
            "Qwen2_5_VLForConditionalGeneration",
            "Qwen2_5_VLConfig",
            {
                "vision_config": {
                    **OF_PATCHES,
                    "hidden_size": WIDTH,
                    "intermediate_size": 176,
                    "out_hidden_size": WIDTH,
                    "fullatt_block_indexes": [1, 3],
                    "window_size": 16,
                },
                "text_config": {**GROUPED, "rope_parameters": OF_THREE_AXES, "use_cache": False},
                "image_token_id": VOCABULARY - 1,
            },
            use_cache=False,
        ),
        inputs=_patches_and_text,
        seq_len=64,
        package="transformers",
    ),
}
"""Small ones, for CPU ranks."""

IN_FP16: Final = (
    "hf-llama", "hf-qwen3", "hf-gpt2", "hf-bert", "hf-t5", "hf-vit", "hf-llama-lora", "lstm", "u-net",
    "two-towers", "encoder",
)  # fmt: skip
"""Small ones that are traced in float16 too."""

WILD: Final[Mapping[str, Wild]] = {**IN_SMALL, **AT_TRUE_SIZE}
"""Other people's modules, by the name of their trace."""

PUBLISHED: Final = frozenset({*AT_TRUE_SIZE, *EXPERTS_AS_PUBLISHED, *WIDE})
"""The names of modules of true size."""

EXPERTS: Final = {"moe_intermediate_size": 48, "num_experts_per_tok": 2}
TALL: Final = {**GROUPED, "head_dim": 16}

OF_SEVERAL_KINDS: Final[dict[str, tuple[str, str, dict[str, Any]]]] = {
    "deepseek-v3": (
        "DeepseekV3ForCausalLM", "DeepseekV3Config",
        {**WIDTHS, **EXPERTS, "num_hidden_layers": 6, "first_k_dense_replace": 2, "n_routed_experts": 8,
         "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
         "v_head_dim": 16, "n_group": 1, "topk_group": 1},
    ),
    "glm4-moe": (
        "Glm4MoeForCausalLM", "Glm4MoeConfig",
        {**TALL, **EXPERTS, "n_routed_experts": 8, "first_k_dense_replace": 1},
    ),
    "llama4-text": (
        "Llama4ForCausalLM", "Llama4TextConfig",
        {**TALL, "num_hidden_layers": 8, "intermediate_size_mlp": 176, "num_local_experts": 4,
         "interleave_moe_layer_step": 2},
    ),
    "smollm3": ("SmolLM3ForCausalLM", "SmolLM3Config", {**TALL, "num_hidden_layers": 8}),
    "qwen2-moe": (
        "Qwen2MoeForCausalLM", "Qwen2MoeConfig",
        {**TALL, **EXPERTS, "num_hidden_layers": 6, "num_experts": 8, "shared_expert_intermediate_size": 64,
         "decoder_sparse_step": 2},
    ),
    "gemma3-mixed": (
        "Gemma3ForCausalLM", "Gemma3TextConfig", {**TALL, "num_hidden_layers": 13, "sliding_window": 16},
    ),
    "gpt-oss-mixed": (
        "GptOssForCausalLM", "GptOssConfig",
        {**TALL, "num_hidden_layers": 6, "num_local_experts": 4, "num_experts_per_tok": 2,
         "sliding_window": 16},
    ),
    "llama-odd": (
        "LlamaForCausalLM", "LlamaConfig", {**GROUPED, "intermediate_size": 177, "vocab_size": 1001},
    ),
    "t5-deep": (*LANGUAGE["t5"][:2], {**LANGUAGE["t5"][2], "num_layers": 5}),
    "bart-deep": (*LANGUAGE["bart"][:2], {**LANGUAGE["bart"][2], "encoder_layers": 4, "decoder_layers": 5}),
}  # fmt: skip
"""Class, class of its configuration, and sizes: blocks of several kinds, two stacks, odd sizes."""

IN_STACKS: Final[Mapping[str, Wild]] = {
    **{
        f"hf-{name}": Wild(
            module=_language(*how, use_cache=False), inputs=_tokens, seq_len=64, package="transformers"
        )
        for name, how in OF_SEVERAL_KINDS.items()
    },
    "hf-llama-lora-bf16": Wild(
        module=_lora("llama", narrow=True), inputs=_tokens, seq_len=64, package="transformers"
    ),
    "hf-llama-peft-bf16": Wild(module=_peft("llama"), inputs=_tokens, seq_len=64, package="peft"),
    "own-checkpoints": Wild(module=OwnCheckpoints, inputs=_next_tokens, seq_len=64),
    "hf-vit-whole": Wild(module=_vit, inputs=_labelled_images, package="transformers"),
    "hf-siglip-whole": Wild(module=_siglip, inputs=_labelled_images, package="transformers"),
    "hf-clip-whole": Wild(module=_clip, inputs=_labelled_images, package="transformers"),
    "hf-whisper": Wild(
        module=_language(
            "WhisperForConditionalGeneration", "WhisperConfig",
            {"d_model": WIDTH, "encoder_layers": 3, "decoder_layers": 5, "encoder_attention_heads": 4,
             "decoder_attention_heads": 4, "encoder_ffn_dim": 176, "decoder_ffn_dim": 176, "dropout": 0.0,
             "vocab_size": VOCABULARY, "num_mel_bins": 20, "max_source_positions": 50,
             "max_target_positions": 128, "decoder_start_token_id": 1, "pad_token_id": 0, "bos_token_id": 1,
             "eos_token_id": 2},
            use_cache=False,
        ),
        inputs=_speech, seq_len=64, package="transformers",
    ),
}  # fmt: skip
"""Small ones with blocks of several kinds, in several stacks, of weights of several types."""


def wild_named(name: str) -> Wild:
    """How a module is made and called: one of `WILD`, or an architecture of transformers in small.

    Raises:
        UnknownName: with the nearest name.
    """
    if found := {**WILD, **IN_STACKS, **EXPERTS_AS_PUBLISHED, **WIDE, **RUN_BY_OTHERS}.get(name):
        return found
    if not is_architecture(name):
        raise unknown_name("module", name, WILD)
    return Wild(module=partial(small_module, name), inputs=_tokens, seq_len=64, package="transformers")


@contextmanager
def values_as_on_a_gpu() -> Iterator[None]:
    """What transformers reads of values while it runs, for a GPU that is not there, which has none.

    It asks whether the positions of a row are those of several packed sequences, which they are not, and
    whether a mask of padding is of ones only, which it is.
    """
    masks = sys.modules.get("transformers.masking_utils")
    if masks is None:
        yield
        return
    find: Callable[..., Any] = masks.find_packed_sequence_indices
    fast_all: Callable[[Tensor], Tensor] = masks.fast_all

    def found(*args: Any, **kwargs: Any) -> None:
        find(*args, **kwargs)

    def all_ones(mask: Tensor) -> bool:
        fast_all(mask)
        return True

    with (
        patch.object(masks, "find_packed_sequence_indices", found),
        patch.object(masks, "fast_all", all_ones),
    ):
        yield


def wild_of(model: TracedModel | Decoder) -> Wild:
    """How a model's module is made and called: a decoder of transformers by its sizes, others by name."""
    if isinstance(model, TracedModel) and is_of_torchtitan(model):
        values = model.config_values() or {}
        return Wild(
            module=partial(mixture_of, Config(values), model.max_seq_len),
            inputs=partial(mixture_inputs, values["vocab_size"]),
            package="torchtitan",
        )
    if isinstance(model, TracedModel):
        return wild_named(model.name)
    values = config_of(model)
    kind, (architecture,) = values["model_type"], values["architectures"]

    def module() -> nn.Module:
        if find_spec("transformers") is None:
            raise PlanRefused("transformers is not installed; pip install 'memplan[huggingface]'.")
        transformers = import_module("transformers")
        settings = transformers.CONFIG_MAPPING[kind].from_dict({**values, "use_cache": False})
        return cast(nn.Module, getattr(transformers, architecture)(settings))

    def inputs(samples: int, seq_len: int, generator: torch.Generator) -> Inputs:
        ids = torch.randint(3, model.vocab_size, (samples, seq_len), generator=generator)
        return {"input_ids": ids, "labels": ids.clone()}

    return Wild(module=module, inputs=inputs, package="transformers")


def wild_trace(asked: Divided) -> TracedModel:
    """One of them, divided, traced anew: with CPU's kernels, or of true size with CUDA's."""
    name = asked.name
    if name in OF_TORCHTITAN:
        return mixture_trace(name, asked.mesh)
    wild = wild_named(name)
    torch.manual_seed(0)
    cp = asked.mesh.get("cp", 1)
    drawn = wild.inputs(wild.gpu_batch or 2, wild.seq_len * cp, torch.Generator().manual_seed(0))
    inputs = inputs_over(cp, drawn)
    of_true_size = wild.gpu_batch is not None
    with torch.device("meta") if of_true_size else nullcontext():
        module = wild.module()
    found = memplan.trace(
        module,
        {name: value for name, value in inputs.items() if name != "targets"},
        targets=inputs.get("targets"),
        name=name,
        max_seq_len=wild.context or wild.seq_len * cp,
        device="cuda" if of_true_size else "cpu",
        precisions=("bf16", "bf16-mixed") if of_true_size and asked.mesh else tuple(_precisions(name)),
        mesh=asked.mesh,
        cp_ranks=(0,) if of_true_size else tuple(range(cp)),
    )
    if of_true_size and wild.inputs is _tokens:
        found = replace(found, config=_config_text(module))
    return found


def _config_text(module: Any) -> str:
    """The config.json that a module of transformers is made of."""
    values = {**json.loads(module.config.to_json_string()), "architectures": [type(module).__name__]}
    return json.dumps(values, sort_keys=True)


def _precisions(name: str) -> Iterator[str]:
    """The precisions that a module is traced in: architectures in those that they are run in."""
    yield "fp32"
    if name in RUN_BY_OTHERS:
        return
    if not is_architecture(name) and name not in IN_STACKS:
        yield "bf16"
    yield "bf16-mixed"
    if name in IN_FP16:
        yield "fp16-mixed"


# --- Under a plan ---


def wild_modules(
    model: TracedModel | Decoder,
    plan: Plan,
    at: Rank,
    mesh: DeviceMesh | None,
    experts: DeviceMesh | None,
    device: torch.device,
    *,
    seed: int,
    made_on: torch.device,
) -> dict[int, nn.Module]:
    """The modules of a rank's stages (without a pipeline a single one), wrapped as the plan says.

    `experts`: the mesh of expert-parallel ranks. Made on `meta`, a module gets its weights on the device when
    it has been cast and divided.
    """
    if isinstance(model, TracedModel) and is_of_torchtitan(model):
        torch.manual_seed(seed)
        return {i: mixture_stage(model, plan, i, mesh, experts, device) for i in plan.stages_of(at.pp)}
    wild = wild_of(model)
    found: dict[int, nn.Module] = {}
    for stage in plan.stages_of(at.pp):
        torch.manual_seed(seed)
        on_host = wild.gpu_batch is None and made_on.type != "meta"
        with nullcontext() if on_host else made_on:
            module = wild.module()
            if plan.adapters is not None:
                module = with_adapters(module, plan, plan.adapters, device)
        if on_host:
            module.to(device)
        module.train()
        if plan.formats.stored != FP32:
            for parameter in module.parameters():
                if parameter.is_floating_point():
                    parameter.data = parameter.data.to(torch_dtype(plan.formats.stored))
        if experts is not None and mesh is not None:
            by_plan_of_transformers(module, {"tp": mesh["tp"], "ep": experts["ep"]})
            EvenRouting(plan).of(module, device)
        elif plan.mesh.dividing and mesh is not None and hasattr(module, "_resolve_parallel_plans"):
            by_plan_of_transformers(module, mesh)
        module = in_float8(module, plan)
        _patch_by_liger(module, plan)
        stacks, path = stacks_of(module, model), ""
        compiles = compile_blocks([one for one in module.modules() if list(one.children()) in stacks], plan)
        if compiles:
            stacks = stacks_of(module, model)
        else:
            checkpoint_blocks(module, plan)
        if plan.pp > 1:
            (own,) = stacks
            path = next(name for name, one in module.named_modules() if list(one.children()) == own)
            module = wild_stage(module, path, plan, stage)
            stacks = [list(module.module.get_submodule(path).children())]
        if not compiles:
            checkpoint_only(stacks, module, plan)
        if plan.fsdp and mesh is not None and torch_options(plan).fsdp_version == 1:
            module = fully_sharded(module, [one for own in stacks for one in own], plan, mesh, device)
        elif plan.fsdp and mesh is not None:
            shard_experts(module, plan, experts)
            shard_weights(module, _units(module, stacks, plan), plan, mesh)
        materialised(module, device)
        if plan.ddp and mesh is not None:
            module = replicated(module, plan, mesh[plan.shard_group])
        found[stage] = module
    return found


def _patch_by_liger(module: nn.Module, plan: Plan) -> None:
    """Give a model of transformers Liger's forward pass, if the plan says so, none of its other kernels."""
    if (kernel := torch_options(plan).liger_kernel) == "none":
        return
    known = import_module("liger_kernel.transformers.monkey_patch").MODEL_TYPE_TO_APPLY_LIGER_FN
    apply = known[cast(Any, module).config.model_type]
    flags = [name for name, one in signature(apply).parameters.items() if isinstance(one.default, bool)]
    apply(model=module, **{name: name == kernel for name in flags})


class EvenRouting:
    """Lets routers choose all experts equally often, as memplan's traces of divided experts say.

    Only the numbers of the experts are written, into the tensor that a router has made. Where no kernel
    computes, the rows that ranks exchange are written too, into the tensor that transformers reads them from.

    Source: transformers.distributed.expert_parallel (`AllToAllEP._dispatch_tokens`).
    """

    def __init__(self, plan: Plan) -> None:
        self.n_ranks, self.tp, self.n_chosen = plan.ep, plan.tp, 0

    def of(self, module: nn.Module, device: torch.device) -> None:
        """Route the tokens of a module."""
        for experts, n in _experts_of(module):
            experts.register_forward_pre_hook(partial(self._write, n_experts=n))
        if device.type != "cpu":
            cast(Any, import_module("transformers.distributed.expert_parallel")).torch = self

    def _write(self, _: nn.Module, arguments: tuple[Any, ...], *, n_experts: int) -> None:
        for one in arguments:
            if not one.is_floating_point():
                self.n_chosen = one.numel()
                even = torch.from_numpy(dealt_out(self.n_chosen, n_experts, self.n_ranks))
                one.data.copy_(even.view(one.shape))

    def stack(self, parts: list[Tensor]) -> Tensor:
        """`torch.stack` of the rows that each rank is sent, and of those that come from it."""
        found = torch.stack(parts)
        rows = torch.full(found.shape, self.n_chosen // self.tp // self.n_ranks)
        return found if found.is_floating_point() else found.copy_(rows)

    def __getattr__(self, name: str) -> Any:
        """Everything else of torch."""
        return getattr(torch, name)


def _experts_of(module: nn.Module) -> list[tuple[nn.Module, int]]:
    """The modules that hold experts divided over ranks, with the number of experts on all ranks."""
    found = []
    for one in module.modules():
        own = [p for p in one.parameters(recurse=False) if is_of_experts(p)]
        if own:
            found.append((one, own[0].shape[0]))
    return found


def shard_experts(module: nn.Module, plan: Plan, mesh: DeviceMesh | None) -> None:
    """FSDP2's units of experts, as transformers makes them: between the ranks that hold the same ones.

    Source: transformers.distributed.fsdp (`apply_fully_sharded_data_parallelism`).
    """
    if mesh is None:
        return
    for experts, _ in _experts_of(module):
        fully_shard(experts, **fsdp_options(plan, mesh, "efsdp"))
        unit = cast(FSDPModule, experts)
        unit.set_gradient_divide_factor(float(plan.n_replicas))
        if plan.efsdp > 1:
            unit.set_force_sum_reduction_for_comms(True)


def _units(
    module: nn.Module, stacks: list[list[nn.Module]], plan: Plan
) -> Iterator[nn.Module | list[nn.Module]]:
    """FSDP2's units below the root: the modules before the blocks, each block, the modules after them."""
    within = {id(parameter) for own in stacks for block in own for parameter in block.parameters()}
    is_block = [(id(parameter) in within, name) for name, parameter in module.named_parameters()]
    rows = [[name for _, name in row] for inside, row in groupby(is_block, key=itemgetter(0)) if not inside]
    for paths in map(modules_with, rows if torch_options(plan).fsdp_units == "block+ends" else ()):
        yield [module.get_submodule(path) for path in paths]
    for blocks in stacks:
        yield from units_of_blocks(blocks, plan)


def checkpoint_blocks(module: nn.Module, plan: Plan) -> None:
    """Turn checkpointing on in a module of transformers, if the plan recomputes."""
    if plan.recompute != "none":
        kept = {"context_fn": kept_contexts} if plan.recompute == "selective" else {}
        cast(Any, module).gradient_checkpointing_enable({"use_reentrant": False, **kept})


def checkpoint_only(stacks: list[list[nn.Module]], module: nn.Module, plan: Plan) -> None:
    """Turn checkpointing off in all layers of transformers except the blocks that the plan recomputes."""
    if plan.recompute == "none":
        return
    blocks = [one for own in stacks for one in own][: plan.recompute_blocks]
    kind = import_module("transformers.modeling_layers").GradientCheckpointingLayer
    for one in cast(Iterator[Any], module.modules()):
        if isinstance(one, kind) and one not in blocks:
            one.gradient_checkpointing = False
        elif isinstance(one, kind):
            one._gradient_checkpointing_func = checkpoint_of(plan, one._gradient_checkpointing_func)


def stacks_of(module: nn.Module, model: TracedModel | Decoder) -> list[list[nn.Module]]:
    """The stacks of blocks of a module, in its order."""
    if isinstance(model, TracedModel):
        owners = [module.get_submodule(path.removesuffix(".*")) for path in model.blocks]
        lists = [list(owner.children()) for owner in owners]
        return [
            own if path.endswith(".*") else [owner]
            for own, path, owner in zip(lists, model.blocks, owners, strict=True)
        ]
    lists = [list(one) for one in module.modules() if isinstance(one, nn.ModuleList)]
    return [next(blocks for blocks in lists if len(blocks) == model.n_layers)]


def divided_over(
    plan: Plan, mesh: DeviceMesh | None, inputs: Mapping[str, Tensor]
) -> AbstractContextManager[None]:
    """A block in which inputs with a sequence are divided over context-parallel ranks, if there are any."""
    if plan.cp == 1 or mesh is None:
        return nullcontext()
    sequences = [one for one in inputs.values() if one.dim() > 1 and one.shape[1] == plan.seq_len]
    return divided_sequences(mesh["cp"], sequences, torch_options(plan).cp_rotate_method)


def wild_inputs(
    model: TracedModel | Decoder, plan: Plan, at: Rank, device: torch.device, *, seed: int
) -> dict[str, Tensor]:
    """This replica's part of the batch."""
    generator = torch.Generator().manual_seed(seed)
    drawn = inputs_over(plan.cp, wild_of(model).inputs(plan.global_batch, plan.seq_len, generator))
    place = at.dp_replicate * plan.dp + at.dp
    own: dict[int, Tensor] = {}
    parts = {name: value.chunk(plan.n_replicas)[place] for name, value in drawn.items()}
    for name, value in drawn.items():
        own.setdefault(id(value), parts[name].clone().to(device))
    found = {name: own[id(value)] for name, value in drawn.items()}
    return found if device.type == "cpu" else known_inputs(found, parts)


def _offloads(module: nn.Module, plan: Plan) -> AbstractContextManager[Any]:
    """TRL's manager of activations on the host, or none."""
    if torch_options(plan).activation_offloading != "OffloadActivations":
        return nullcontext()
    found = import_module("trl.models.activation_offloading").get_act_offloading_ctx_manager(module)
    return cast(AbstractContextManager[Any], found)


def wild_passes(
    modules: Mapping[int, nn.Module],
    model: TracedModel | Decoder,
    plan: Plan,
    at: Rank,
    mesh: DeviceMesh | None,
    device: torch.device,
    scaler: GradScaler,
    *,
    seed: int,
) -> Passes:
    """Forward and backward of one step on this replica's part of the batch."""
    inputs = wild_inputs(model, plan, at, device, seed=seed)
    if model.name == "two-towers":
        inputs["targets"] %= plan.micro_batch
    if plan.pp > 1 and isinstance(model, Decoder) and 0 not in modules:
        del inputs["input_ids"]
    whole = {name: value.cpu().numpy().copy() for name, value in inputs.items()} if plan.cp > 1 else {}
    run = _passes(modules, model, plan, inputs, mesh, device, scaler)

    def restored() -> float | None:
        total = run()
        for name, value in whole.items():
            inputs[name].resize_(value.shape).copy_(torch.from_numpy(value))
        return total

    if plan.cp > 1 or device.type == "cpu":  # the ranks of a sequence have rows that are not consecutive
        return restored
    return values_as_on_a_gpu()(constants_known()(run))


def _passes(
    modules: Mapping[int, nn.Module],
    model: TracedModel | Decoder,
    plan: Plan,
    inputs: Mapping[str, Tensor],
    mesh: DeviceMesh | None,
    device: torch.device,
    scaler: GradScaler,
) -> Passes:
    """Forward and backward of one step on these inputs, left as a context-parallel rank has them."""
    if plan.pp > 1 and mesh is not None:
        sizes = model.config_values() or {}
        width = model.d_model or sizes.get("hidden_size", WIDTH)
        vocabulary = 0 if "targets" not in inputs else sizes.get("vocab_size", VOCABULARY)
        run = wild_pipeline(modules, plan, inputs, mesh, device, scaler, width=width, vocabulary=vocabulary)

        def scheduled() -> float | None:
            with divided_over(plan, mesh, inputs):
                return run()

        return scheduled
    (module,) = modules.values()
    n = plan.n_micro_batches
    offloads = _offloads(module, plan)
    compute = torch_dtype(plan.formats.compute)

    def part_of(i: int) -> dict[str, Tensor]:
        part = {name: value.chunk(n)[i] for name, value in inputs.items()}
        if plan.formats.stored != FP32:
            part = {
                name: value.to(compute) if value.is_floating_point() else value
                for name, value in part.items()
            }
        return part

    def trained() -> float:
        total = 0.0
        for i in range(n):
            part = part_of(i)
            with syncing(module, plan, last=i == n - 1), divided_over(plan, mesh, part):
                with autocast(plan, device), offloads:
                    found = loss_of(module, part) / n
                scaler.scale(found).backward()
            total += float(found.detach())
            del found
        return total

    return trained
