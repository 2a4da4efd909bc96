"""A model of transformers, made from its config.json and traced as transformers' own code runs it.

The file says sizes only: code that it names (`auto_map`) is never fetched or run, and nothing is downloaded.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from inspect import signature
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from memplan.adapters import ADAPTERS, Adapters
from memplan.checks import checked_count
from memplan.device import DeviceType
from memplan.errors import (
    InvalidValue,
    MemplanError,
    MissingRule,
    UnknownName,
    did_you_mean,
    installed,
    reason,
    shown_value,
    unknown_name,
)
from memplan.mesh import Group, degrees_text
from memplan.models.base import MOST_LAYERS
from memplan.models.config import Config
from memplan.models.recording import (
    AUTOTP,
    BEYOND_WINDOW,
    FLOAT8,
    FLOAT8_ALL_GATHER,
    MICRO_BATCH,
    REFERENCE,
    TRAINER,
    ULYSSES,
    ZERO3,
    ByTrainer,
    Compiles,
    Scoring,
)
from memplan.models.traced import TracedModel
from memplan.tracing.adapters import with_adapters
from memplan.tracing.autotp import divided_by_autotp
from memplan.tracing.cache import without_remarks
from memplan.tracing.context import as_trainer_divides
from memplan.tracing.cuda import CUDA
from memplan.tracing.divided import windows_of
from memplan.tracing.example import IMAGES, Example, checked_example, image_tokens
from memplan.tracing.float8 import with_float8
from memplan.tracing.tracer import RUNS, USUAL, checked_mesh, traced
from memplan.tracing.trainer import as_trainer_calls, loss_by_trainer
from memplan.tracing.ulysses import divided_by_ulysses

LENGTH: Final = 704
"""The sequence length of the example inputs, shorter for a model with a shorter context.

No multiple of the lengths that code divides a sequence into, 128 and 256, so that their padding shows.
"""

IMAGE: Final = 224
"""Rows and columns of an image, where the file does not say."""

ANY_SIZE: Final = 448
"""Rows and columns of an image where a model takes images of any size."""

NOT_READ: Final = ("auto_map", "torch_dtype", "dtype", "attn_implementation", "use_cache")
"""Keys that say where code is, or what a plan says."""

OF_PLANS: Final = (
    *(ADAPTERS, ZERO3, ULYSSES, AUTOTP, FLOAT8, FLOAT8_ALL_GATHER, TRAINER, BEYOND_WINDOW),
    MICRO_BATCH,
)
"""Keys that memplan adds to a file's own, of what a plan says."""

REACHED: Final = 16
"""A window that all traced sequences reach."""

ITSELF: Final = "trace the module itself, with its inputs and its loss (memplan.trace)."
"""The way out where inputs are not made here."""

LENGTHS: Final = (
    "max_position_embeddings",
    "n_positions",
    "seq_length",
    "max_seq_len",
    "max_target_positions",
)
"""Names of the trained length."""

LAYERS: Final = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers")
"""Names of the number of blocks."""


def traced_from_config(
    config: Config,
    name: str,
    device: DeviceType,
    precisions: Sequence[str] = (),
    mesh: Mapping[Group, int] | None = None,
    compiles: Compiles | None = None,
) -> TracedModel:
    """The model of a config.json whose `model_type` transformers knows.

    Its class is that of `architectures`, else the first of its type's that `TASKS` knows. It is traced for
    those of these precisions that are memplan's own; for the usual ones where there are none. Over a `mesh`
    it is divided by its own plan.

    Raises:
        MissingPackage: transformers, or what it imports for the class, is not installed or is broken.
        UnknownName: a type or an architecture that transformers does not have.
        InvalidValue: values with which transformers' own code fails.
        MissingRule: for code that cannot be traced.
    """
    what = f"{name} over {degrees_text(mesh)}" if mesh else "this architecture"
    with installed(what, "huggingface"), without_remarks():
        transformers: Any = import_module("transformers")
    kind = config.value("model_type", None)
    if kind not in transformers.CONFIG_MAPPING:
        raise _unknown(kind, config, transformers)
    for key in LAYERS:
        checked_count(key, config.value(key, 1), most=MOST_LAYERS)
    task, class_name = _class_of(kind, config.architecture)
    offline = patch.object(import_module("huggingface_hub.constants"), "HF_HUB_OFFLINE", True)
    with installed(f"transformers' {class_name}", "huggingface"), without_remarks():
        its_class = getattr(transformers, class_name)
    try:
        with offline, _Unfilled():
            settings = transformers.CONFIG_MAPPING[kind].from_dict(_own_values(config))
            settings.get_text_config().use_cache = False
            module = its_class._from_config(settings)
        inputs = _inputs_of(task, module, (mesh or {}).get("cp", 1), config.value(MICRO_BATCH, 1))
        if adapters := config.value(ADAPTERS, None):
            module = with_adapters(module, Adapters(**adapters), _of_products(precisions))
        known = _longest(settings) if "input_ids" in inputs else None
        lengths = _at_window(module.config, beyond=config.value(BEYOND_WINDOW, False))
        example, parallelize = _example(module, inputs, config.value(TRAINER, None)), None
        if ulysses := config.value(ULYSSES, False):
            example, parallelize = divided_by_ulysses(module, inputs)
        if autotp := config.value(AUTOTP, False):
            parallelize = divided_by_autotp
        with_float8(module, config.value(FLOAT8, "none"), all_gather=config.value(FLOAT8_ALL_GATHER, False))
        runs_on = torch.device("cpu") if device == "cpu" else CUDA
        asked = [precision for precision in precisions if precision in RUNS] or USUAL
        found = traced(
            example,
            runs_on,
            None,
            asked,
            known,
            name,
            any_length=True,
            mesh=checked_mesh(mesh or {}),
            parallelize=parallelize,
            zero3=config.value(ZERO3, False),
            of_deepspeed=ulysses or autotp,
            compiles=compiles,
        )
        return replace(found, lengths=lengths)
    except MemplanError:
        raise
    except Exception as error:
        raise InvalidValue(
            f"fails in transformers {transformers.__version__} ({class_name}: {reason(error)}); use the "
            "model's own config.json."
        ) from error


def _own_values(config: Config) -> dict[str, Any]:
    """What transformers reads of a config.json, for training."""
    not_read = *NOT_READ, *OF_PLANS, "use_cache"
    own = {k: v for k, v in config.values.items() if k not in not_read and not k.startswith("_")}
    return own | {"use_cache": False}


def _example(module: Any, inputs: "Inputs", called: Mapping[str, Any] | None) -> Example:
    """The module called with these inputs, by the trainer that a config.json's values say."""
    if not called:
        return checked_example(module, inputs)
    scoring = Scoring(*called["scoring"]) if "scoring" in called else None
    by = ByTrainer(**{**called, "scoring": scoring})
    if scoring:
        inputs = {name: one[:1, :1].repeat(scoring[:2]) for name, one in inputs.items()}
    inputs, before = as_trainer_calls(module, by, inputs)
    example = checked_example(module, inputs, loss_by_trainer(by))
    apart = REFERENCE if by.reference == "sharded copy" else ""
    casts = by.casts_inputs and not scoring  # TRL's trainers hold floats that no module is called with
    example = replace(example, by_trainer=True, before=before, casts_inputs=casts, apart=apart)
    example = replace(example, hooks_again=bool(by.hooks_again), wraps_blocks=bool(by.wraps_blocks))
    return replace(example.at(scoring[:2]), is_of_one_size=True) if scoring else example


def _of_products(precisions: Sequence[str]) -> torch.dtype:
    """The type in which products run in the first of these precisions."""
    weights, autocast = RUNS[precisions[0]][0]
    found: torch.dtype = getattr(torch, autocast or weights)
    return found


def inputs_of(module: nn.Module, cp: int = 1) -> "Inputs | None":
    """What a module of transformers is called with, over context-parallel ranks; None for any other module.

    Raises:
        UnknownName: a class that is in none of the tables of `TASKS`.
    """
    transformers: Any = sys.modules.get("transformers")
    if transformers is None or not isinstance(module, transformers.PreTrainedModel):
        return None
    settings: Any = module.config
    task, _ = _class_of(settings.model_type, type(module).__name__)
    return _inputs_of(task, module, cp)


def _inputs_of(task: str, module: Any, cp: int, samples: int = 1) -> "Inputs":
    """What a module is called with for a task, on each of these context-parallel ranks as many tokens.

    `samples`: how many a micro-batch has, where the module loops over its images.

    Raises:
        MissingRule: the settings do not say what these are made of.
    """
    settings = module.config
    try:
        length = _example_length(settings) * cp
        if task == WITH_IMAGES:
            of_any_size = "image_grid_thw" in _arguments(module)
            inputs = (
                _patches_and_text(module, length, samples) if of_any_size else _image_and_text(module, length)
            )
        else:
            inputs = TASKS[task](settings, length)
    except AttributeError as missing:
        raise MissingRule(
            f"a config.json does not say what {type(module).__name__} is called with ({missing}); {ITSELF}",
            kind="a class of transformers whose inputs a config.json does not say",
        ) from missing
    return as_trainer_divides(inputs) if cp > 1 and task == "CAUSAL_LM" else inputs


def _longest(settings: Any) -> int:
    """The trained length."""
    of_text = settings.get_text_config()
    return next((found for key in LENGTHS if (found := getattr(of_text, key, None) or 0) > 0), LENGTH)


def _at_window(settings: Any, *, beyond: bool) -> tuple[int, int]:
    """The least and the most tokens of the sequences that reach a module's window, or of those that do not.

    All traced sequences are made to reach it, or not to: only the values of its masks depend on its size.
    """
    longest = _longest(settings)
    windows = {key: size for key, size in windows_of(settings).items() if size <= longest}
    if not windows:
        return 0, 0
    for key in windows:
        setattr(settings.get_text_config(), key, REACHED if beyond else longest + 1)
    window = min(windows.values())
    return (window, 0) if beyond else (0, window - 1)


def _example_length(settings: Any) -> int:
    """Tokens of an example: whole 16s, fewer than the trained length, as RoBERTa's positions begin at 2."""
    shorter = min(LENGTH, _longest(settings) * 15 // 16)
    return shorter // 16 * 16 or _longest(settings)


def _unknown(kind: Any, config: Config, transformers: Any) -> UnknownName:
    own = "; the code that auto_map names is never run" if config.value("auto_map", None) else ""
    known = list(transformers.CONFIG_MAPPING.keys())
    near = did_you_mean(kind, known) if isinstance(kind, str) else "."
    return UnknownName(
        f"unknown model architecture {shown_value(kind)}{near} It is none of the {len(known)} that "
        f"transformers {transformers.__version__} has{own}; use a release that has it, or trace the module "
        "itself (memplan.trace)."
    )


def _class_of(kind: str, architecture: str | None) -> tuple[str, str]:
    """The task and the name of a class of transformers."""
    tables = import_module("transformers.models.auto.modeling_auto")
    known: dict[str, str] = {}
    for task in (*TASKS, WITH_IMAGES):
        names = getattr(tables, f"MODEL_FOR_{task}_MAPPING_NAMES").get(kind, ())
        for name in [names] if isinstance(names, str) else names:
            known.setdefault(name, task)
    if architecture is None and known:
        architecture = next(iter(known))
    if architecture not in known:
        its_class = getattr(import_module("transformers"), architecture or "", None)
        if getattr(getattr(its_class, "config_class", None), "model_type", None) == kind:
            others = [name for name, task in known.items() if task != WITH_IMAGES]
            instead = f"name {' or '.join(others)} in architectures, or " if others else ""
            raise MissingRule(
                f"a config.json does not say what {architecture} is called with; {instead}{ITSELF}",
                kind="a class of transformers whose inputs a config.json does not say",
            )
        traced = f"Known: {', '.join(known)};" if known else f"No {kind} is traced from a config.json;"
        raise unknown_name(f"{kind} architecture", architecture, known, f"{traced} {ITSELF}")
    return known[architecture], architecture


class _Unfilled(TorchFunctionMode):
    """What would be filled with weights later has a shape only."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        if func in (torch.empty, torch.rand, torch.randn) and not named.get("device"):
            made = func(*args, **{**named, "device": "meta"})
            if made.is_floating_point():
                return made
        return func(*args, **named)


Inputs = Mapping[str, Any]


def _tokens(settings: Any, length: int) -> dict[str, Tensor]:
    """Two sequences of ids, none of which is a special token's."""
    vocabulary = settings.get_text_config().vocab_size
    ids = torch.arange(2 * length).reshape(2, length) % max(vocabulary - 4, 1) + min(4, vocabulary - 1)
    return {"input_ids": ids}


def _next_tokens(settings: Any, length: int) -> Inputs:
    found = _tokens(settings, length)
    return {**found, "labels": found["input_ids"].clone()}


def _classes_of_tokens(settings: Any, length: int) -> Inputs:
    return {**_tokens(settings, length), "labels": torch.zeros(2, length, dtype=torch.int64)}


def _classes_of_texts(settings: Any, length: int) -> Inputs:
    return {**_tokens(settings, length), "labels": torch.zeros(2, dtype=torch.int64)}


def _spans(settings: Any, length: int) -> Inputs:
    at = torch.zeros(2, dtype=torch.int64)
    return {**_tokens(settings, length), "start_positions": at, "end_positions": at.clone()}


def _pixels(settings: Any) -> Tensor:
    """Two images of the size that the settings say, or those of their part for images."""
    own = getattr(settings, "vision_config", settings)
    size = getattr(own, "image_size", IMAGE)
    rows, columns = size if isinstance(size, list | tuple) else (size, size)
    return torch.empty(2, own.num_channels, rows, columns, device="meta")


def _images(settings: Any, _length: int) -> Inputs:
    return {"pixel_values": _pixels(settings), "labels": torch.zeros(2, dtype=torch.int64)}


def _segments(settings: Any, _length: int) -> Inputs:
    """Images, and a class for each of their pixels."""
    images = _pixels(settings)
    return {"pixel_values": images, "labels": torch.zeros(2, *images.shape[2:], dtype=torch.int64)}


def _pairs(settings: Any, length: int) -> Inputs:
    """Images and as many texts, of which those that belong together are told apart from all others."""
    return {**_tokens(settings, length), "pixel_values": _pixels(settings), "return_loss": True}


def _image_and_text(module: Any, length: int) -> Inputs:
    """Two sequences, each of an image of the size that the settings say and of this many tokens of text.

    Raises:
        MissingRule: the settings do not say an image's size, or the module is given more than images.
    """
    settings = module.config
    try:
        token, images = next(image_tokens(settings)), _pixels(settings)
        with torch.no_grad(), torch.device("meta"):
            found = type(module)._from_config(settings).get_image_features(images[:1]).pooler_output
    except (AttributeError, StopIteration, TypeError) as error:
        raise MissingRule(
            f"{settings.model_type}'s config.json does not say the sizes of the images that "
            f"{type(module).__name__} is given ({reason(error)}); {ITSELF}",
            kind="a class of transformers whose images a config.json does not say",
        ) from error
    pieces = found[0] if isinstance(found, list | tuple) else found
    n = pieces.numel() // pieces.shape[-1]
    text = _tokens(settings, length)["input_ids"]
    ids = torch.cat([torch.full((2, n), token), text + (text == token)], 1)
    types = {"token_type_ids": (ids != token).long()} if "token_type_ids" in _arguments(module) else {}
    return {"input_ids": ids, **types, "labels": ids.clone(), "pixel_values": images}


def _patches_and_text(module: Any, length: int, samples: int) -> Inputs:
    """Sequences that begin with an image of any size, cut into patches, whose grid is an input too.

    The size is `image_size` of the settings' part for images, which classes of such images do not have, else
    `ANY_SIZE`: to the next whole cells of patches that become one token, as their processors have it.

    Raises:
        MissingRule: modules between the blocks of images read these.

    Source: transformers.models.qwen2_vl.image_processing_qwen2_vl (`smart_resize`, `preprocess`).
    """
    settings = module.config
    own = settings.vision_config
    if getattr(own, "deepstack_visual_indexes", None):
        raise MissingRule(
            f"{type(module).__name__} reads blocks of images (deepstack_visual_indexes) by modules that run "
            "between them and are in no unit of FSDP2's but the root, which has no rule yet; use a model "
            "that does not.",
            kind="a class of transformers that reads blocks of images between them",
        )
    token, merged = next(image_tokens(settings)), own.spatial_merge_size
    size = getattr(own, "image_size", ANY_SIZE)
    pixels = size if isinstance(size, list | tuple) else (size, size)
    rows, columns = [max(1, round(n / (own.patch_size * merged))) * merged for n in pixels]
    width = own.in_channels * own.temporal_patch_size * own.patch_size**2
    patches = torch.empty(samples * rows * columns, width, device="meta")
    n = rows * columns // merged**2
    text = _tokens(settings, length)["input_ids"][:1].repeat(samples, 1)
    ids = torch.cat([torch.full((samples, n), token), text + (text == token)], 1)
    grid = torch.tensor([[1, rows, columns]]).repeat(samples, 1)
    types = {"mm_token_type_ids": (ids == token).long()} if "mm_token_type_ids" in _arguments(module) else {}
    return {"input_ids": ids, **types, "labels": ids.clone(), IMAGES: patches, "image_grid_thw": grid}


def _arguments(module: nn.Module) -> Mapping[str, Any]:
    """The arguments of a module's forward pass."""
    return signature(module.forward).parameters


def _speech(settings: Any, length: int) -> Inputs:
    """Spectrograms of the only length that the model takes, and the text."""
    frames = 2 * settings.max_source_positions
    heard = torch.empty(2, settings.num_mel_bins, frames, device="meta")
    return {"input_features": heard, "labels": _tokens(settings, length)["input_ids"]}


TASKS: Final[Mapping[str, Callable[[Any, int], Inputs]]] = {
    "SEQ_TO_SEQ_CAUSAL_LM": _next_tokens,
    "MASKED_LM": _next_tokens,
    "CAUSAL_LM": _next_tokens,
    "SPEECH_SEQ_2_SEQ": _speech,
    "IMAGE_CLASSIFICATION": _images,
    "SEQUENCE_CLASSIFICATION": _classes_of_texts,
    "TOKEN_CLASSIFICATION": _classes_of_tokens,
    "QUESTION_ANSWERING": _spans,
    "SEMANTIC_SEGMENTATION": _segments,
    "ZERO_SHOT_IMAGE_CLASSIFICATION": _pairs,
}
"""What a class is called with, by the name of transformers' table of such classes."""

WITH_IMAGES: Final = "IMAGE_TEXT_TO_TEXT"
"""The table of classes that are called with images and text."""
