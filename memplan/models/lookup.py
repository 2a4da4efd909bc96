"""A model from its name, its file, or itself."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from memplan.adapters import ADAPTERS, Adapters
from memplan.device import DeviceType
from memplan.errors import (
    InvalidValue,
    MemplanError,
    MissingPackage,
    MissingRule,
    UnknownName,
    installed,
    shown_value,
    unknown_name,
)
from memplan.files import of_file
from memplan.mesh import Group, with_several
from memplan.models.base import Model, not_adapted, not_divided_so
from memplan.models.config import Config, WithoutRule, config_file, model_name, read_config
from memplan.models.families import FAMILIES, implementations_of, implemented
from memplan.models.hub import hub_config, is_repository
from memplan.models.presets import preset, preset_named, preset_names
from memplan.models.recording import (
    AUTOTP,
    BEYOND_WINDOW,
    FLOAT8,
    FLOAT8_ALL_GATHER,
    MICRO_BATCH,
    MIXTURE,
    SEQUENCE_PARALLEL,
    TORCHTITAN,
    TRAINER,
    ULYSSES,
    ZERO3,
    ByTrainer,
    Compiles,
)
from memplan.models.trace_from_json import is_trace, model_from_trace
from memplan.models.traced import TracedModel

if TYPE_CHECKING:
    from pathlib import Path


OF_PEFT: Final = "huggingface"
"""The implementation beside whose weights PEFT trains adapters."""


class Tracing(NamedTuple):
    """How a model that has no family is traced: see `resolve`."""

    device: DeviceType
    precisions: Sequence[str]
    cache: bool
    mesh: Mapping[Group, int]


def is_of_transformers(asked: Mapping[str, Any]) -> bool:
    """Whether keywords ask for what only transformers' models have.

    These are adapters, Liger's loss, the Trainer, and what DeepSpeed divides: sequences, and layers.
    """
    others = any(asked.get(name, "none") != "none" for name in ("liger_kernel", "trainer"))
    degrees = {asked.get(axis, 1) for axis in ("cp", "tp")} if asked.get("engine") == "deepspeed" else set()
    return asked.get("lora_rank") is not None or others or bool(degrees - {1})


def resolve(
    model: Model | str | os.PathLike[str] | Any,
    implementation: str | None = None,
    device: DeviceType = "cuda",
    *,
    precisions: Sequence[str] = (),
    cache: bool = True,
    mesh: Mapping[Group, int] | None = None,
    adapted: bool = False,
) -> Model:
    """The model: from a Model itself, a name, the path of a trace or a config.json, or a module.

    A name is a preset's, or a repository of the Hugging Face Hub, as Qwen/Qwen3-8B: the preset of the same
    sizes if there is one, else its config.json (`memplan.models.hub`). A preset's own name goes before a
    path: write ./gpt2 for the folder; a path goes before other names. How a name was read is in `remarks`.
    A module of your own is given with its example inputs, as `memplan.tracing.factory.traced_example` takes
    them.

    `implementation`: whose code trains it; None: the model's own, or the default of the preset or file.
    `device`: whose kernels are traced, in these `precisions`, where the architecture of a config.json has no
    family, or of a module, divided over a `mesh` if there is one. `cache=False`: a config.json is traced anew
    (`memplan.tracing.cache`). `adapted`: as `is_of_transformers` says: the default is their code.

    >>> resolve("gpt2").n_blocks
    12

    Raises:
        UnknownName: a name that is none of these; an implementation that there is not.
        InvalidValue: a path whose file is no model's configuration, or a value of another type; a repository
            whose config.json cannot be read.
    """
    how = Tracing(device, precisions, cache, mesh or {})
    found = _resolved(model, how)
    if implementation == MIXTURE and isinstance(found, TracedModel) and found.config:
        return _in_torchtitan(found, how)
    if implementation is None and adapted and OF_PEFT in implementations_of(found):
        implementation = OF_PEFT
    return found if implementation is None else implemented(found, implementation)


def _in_torchtitan(model: TracedModel, how: Tracing) -> TracedModel:
    """The mixture of experts of a config.json as torchtitan's own code runs it."""
    from memplan.tracing.cache import traced_from_config  # slow to import, and rarely needed

    values = {**(model.config_values() or {}), MIXTURE: True}
    return traced_from_config(
        Config(values), model.name, how.device, how.precisions, cache=how.cache, mesh=how.mesh
    )


def divided(
    model: Model,
    mesh: Mapping[Group, int],
    device: DeviceType,
    precision: str,
    adapters: Adapters | None = None,
    compiles: Compiles | None = None,
    float8: str = "none",
    trainer: ByTrainer | None = None,
    *,
    gathers_float8: bool = False,
    sequence_parallel: bool = False,
) -> Model:
    """The model as one rank of a mesh trains it: itself, if its operations divide themselves.

    Else its module is traced as its framework's own plan divides it, for this precision, with the kernels of
    a device; with `adapters` as PEFT trains it, with `compiles` as `torch.compile` runs its blocks, in
    `float8` by torchao's recipe of that name, with weights that FSDP2 `gathers_float8` or not, called as a
    `trainer` does where no rules say it. Compiled blocks also divide sequences if `sequence_parallel`. The
    trace is kept in the user's cache folder.

    Raises:
        MissingRule: of a trace, for degrees that it was not made for; a model that PEFT does not know.
        MemplanError: it cannot be divided so, or not here.
    """
    of_module = compiles is not None or float8 != "none"
    by_rules = adapters is None and model.takes_padding_mask and (trainer is None or trainer.scoring is None)
    called = None if by_rules else trainer
    as_it_is = adapters is None and not of_module and called is None
    if as_it_is and (model.divides_itself or mesh == model.mesh):
        return model
    values = module_values(model) if of_module else model.config_values()
    if values is None and adapters is not None:
        raise not_adapted(model)
    if values is None:
        raise not_divided_so(model, mesh)
    if adapters is not None:
        values |= {ADAPTERS: adapters._asdict()}
    if float8 != "none":
        values |= {FLOAT8: float8}
    if gathers_float8:
        values |= {FLOAT8_ALL_GATHER: True}
        precision = "bf16"  # as FSDP2 hands weights over; nothing is under autocast
    if sequence_parallel and of_module:
        values |= {SEQUENCE_PARALLEL: True}
    if called is not None:
        values |= {TRAINER: {key: value for key, value in called._asdict().items() if value is not None}}
    from memplan.tracing.cache import traced_from_config  # slow to import, and rarely needed

    return traced_from_config(
        Config(values), model.name, device, (precision,), cache=True, mesh=mesh, compiles=compiles
    )


def module_values(model: Model) -> dict[str, Any]:
    """The values that the model's module is made of: its config.json, or torchtitan's sizes.

    Raises:
        MissingRule: it has no such module.
    """
    from memplan.models.torchtitan import TorchtitanLlama  # a family is imported when it is used

    if isinstance(model, TorchtitanLlama):
        return {TORCHTITAN: model.sizes()}
    values = model.config_values()
    if values is None:
        raise MissingRule(
            f"compile and float8: {model.name} ({model.code}) is no module of transformers or torchtitan, "
            f"which alone are compiled or converted here; {_other_code(model)} leave both out.",
            kind="torch.compile or float8 of a model that is none of transformers or torchtitan",
        )
    return values


def _other_code(model: Model) -> str:
    found = OF_PEFT in implementations_of(model)
    return f"use implementation={OF_PEFT!r}, or" if found else "use"


def under_deepspeed(
    model: Model, device: DeviceType, precision: str, *, zero3: bool, cp: int = 1, tp: int = 1
) -> Model:
    """The model as DeepSpeed runs it, under ZeRO-3 or not, over several ranks: itself, if known so.

    Else its module is traced for this precision, as by `divided`: with the hooks of ZeRO-3 where its
    operations are not known by module, with the all-to-alls of Ulysses over context-parallel ranks, and
    as AutoTP divides it over tensor-parallel ones.

    Raises:
        MissingRule: it was not traced so, and no config.json says how to.
    """
    mesh = with_several(cp=cp, tp=tp)
    asked = zero3, cp > 1, tp > 1, mesh
    if isinstance(model, TracedModel) and asked == (
        model.is_zero3,
        model.is_ulysses,
        model.is_autotp,
        model.mesh,
    ):
        return model
    if not mesh and (not zero3 or model.implementation in HOOKED):
        return model
    values = model.config_values()
    if values is None:
        raise MissingRule(
            f"zero=3: {model.name} was not traced for DeepSpeed's ZeRO-3, which gathers module by module; "
            "trace it with memplan.trace(..., zero3=True).",
            kind="DeepSpeed's ZeRO-3 of a model that was not traced for it",
        )
    values |= {key: True for key, given in ((ZERO3, zero3), (ULYSSES, cp > 1), (AUTOTP, tp > 1)) if given}
    from memplan.tracing.cache import traced_from_config  # slow to import, and rarely needed

    return traced_from_config(Config(values), model.name, device, (precision,), cache=True, mesh=mesh)


def of_sizes(
    model: Model,
    micro_batch: int,
    seq_len: int,
    device: DeviceType,
    precision: str,
    compiles: Compiles | None = None,
) -> Model:
    """The model as it trains micro-batches and sequences of these sizes: itself, or a trace of such.

    A trace of a config.json is of sequences that reach its attention's window, or of shorter ones; for the
    others it is traced again, as by `divided`. So is a module that goes through samples one by one, for each
    micro-batch. A trace from elsewhere is left as it is.

    Raises:
        MemplanError: as by `divided`.
    """
    if not isinstance(model, TracedModel) or not model.config:
        return model
    values = model.config_values() or {}
    other: dict[str, Any] = {}
    if not model.is_of(seq_len):
        other[BEYOND_WINDOW] = not values.get(BEYOND_WINDOW, False)
    if model.of_batch not in (0, micro_batch):
        other[MICRO_BATCH] = micro_batch
    if not other:
        return model
    from memplan.tracing.cache import traced_from_config  # slow to import, and rarely needed

    asked = Config(values | other)
    found = traced_from_config(
        asked, model.name, device, (precision,), cache=True, mesh=model.mesh, compiles=compiles
    )
    return replace(found, remarks=model.remarks, asked_dtype=model.asked_dtype)


HOOKED: Final = ("reference", "torchtitan")
"""The implementations whose modules are known by name (`memplan.ops.modules`)."""


def _resolved(model: Any, how: Tracing) -> Model:
    if isinstance(model, Model):
        return model
    if isinstance(model, os.PathLike):
        return _of_file(model, how)
    if isinstance(model, tuple | Mapping) or hasattr(model, "named_parameters"):
        with installed("a module that is traced", "trace"):
            from memplan.tracing.factory import traced_example  # imports torch, as the module's owner does

        return traced_example(model, how.device, how.precisions, mesh=how.mesh)
    if not isinstance(model, str):
        raise InvalidValue(
            f"model={shown_value(model)} is not a model; use a preset's name, the path of a config.json, "
            "or a memplan.Model."
        )
    if model not in preset_names() and _looks_like_a_path(model):
        return _of_file(model, how)
    if preset_named(model) is None and is_repository(model):
        return _of_repository(model, how)
    return preset(model)


def _of_repository(repository: str, how: Tracing) -> Model:
    """The model of a repository of the Hub: of its config.json."""
    file, revision = hub_config(repository)
    remark = f"{repository} is read from its config.json on the Hugging Face Hub, revision {revision[:12]}."
    found = _of_config(file, repository.rpartition("/")[2], how)
    return replace(found, remarks=(remark, *found.remarks))


def _of_file(path: str | os.PathLike[str], how: Tracing) -> Model:
    """The model of a trace or of a config.json."""
    if is_trace(path):
        return model_from_trace(path)
    file = config_file(path)
    return _of_config(file, model_name(file), how)


def model_from_config(
    path: str | os.PathLike[str], device: DeviceType = "cuda", *, cache: bool = True
) -> Model:
    """The Model that a `config.json` describes; `path` is the file or its folder.

    An architecture that has a family is read without any other package. Every other one that transformers
    knows, and one with a setting that its family has no rule for (dropout, say), is traced from its code, if
    that is installed, with the kernels of `device` and the usual precisions. Its trace is kept in the user's
    cache folder, and made anew if `cache` is False. Keys that are absent or null take transformers' defaults;
    keys that change no size are ignored.

    Neglects: `rope_scaling` (it changes angles, no size) and, with a remark, the type that weights are loaded
    in (`dtype`) and that a vendor stores them in (`quantization_config`): the plan's precision decides.

    Raises:
        UnknownName: an architecture that nobody here knows, by name.
        InvalidValue: a file that cannot be read as a model's configuration, and why.
    """
    file = config_file(path)
    return _of_config(file, model_name(file), Tracing(device, (), cache, {}))


def _of_config(file: "Path", name: str, how: Tracing) -> Model:
    try:
        config = read_config(file)
        remarks, dtype = config.remarks(), config.asked_dtype
        found = _of_values(config.without("quantization_config"), name, how)
        return replace(found, remarks=remarks, asked_dtype=dtype) if remarks or dtype else found
    except MemplanError as error:
        raise of_file(file, error) from None


def _of_values(config: Config, name: str, how: Tracing) -> Model:
    """The model of a config.json's values."""
    families = map(FAMILIES.named, FAMILIES.names())
    readers = {kind: reader for family in families for kind, reader in family.readers.items()}
    known = {kind: reader.architecture for kind, reader in readers.items()}
    kind = config.model_type(known)
    if kind not in known or config.architecture not in (None, known[kind]):
        return _traced_from(config, kind, name, known, how)
    try:
        return readers[kind].read(config, name)
    except WithoutRule:
        found = _traced(config, name, how)
        if found is None:
            raise
        return found


def _traced_from(config: Config, kind: str, name: str, known: Mapping[str, str], how: Tracing) -> Model:
    """The model of an architecture without a family, traced from transformers' code."""
    found = _traced(config, name, how)
    if found is not None:
        return found
    if kind in known:
        unknown = unknown_name(f"{kind} architecture", config.architecture, [known[kind]])
    else:
        unknown = unknown_name("model architecture", kind, known)
    raise UnknownName(
        f"{unknown} Others are traced from transformers' own code: pip install 'memplan[huggingface]'."
    )


def _traced(config: Config, name: str, how: Tracing) -> Model | None:
    """The model traced from transformers' code; None where that is not installed."""
    from memplan.tracing.cache import traced_from_config  # slow to import, and rarely needed

    try:
        return traced_from_config(config, name, how.device, how.precisions, cache=how.cache, mesh=how.mesh)
    except MissingPackage as missing:
        if missing.absent not in ("torch", "transformers"):
            raise
    return None


def _looks_like_a_path(text: str) -> bool:
    if text.endswith(".json") or text in (".", "..") or (os.sep in text and not is_repository(text)):
        return True
    try:
        return os.path.exists(text)
    except ValueError:
        return False
