"""Reference pages, from the package's own tables, docstrings and commands."""

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any, Final

import memplan
from memplan import plots
from memplan.cli import MODULES
from memplan.cli.listings import divisions
from memplan.engines.base import ENGINES
from memplan.engines.options import option_fields
from memplan.fields import Choice, Count, Counts, Field, Flag, Number, Registered
from memplan.mesh import AXES, VIEWS
from memplan.models import preset_source
from memplan.models.families import implementations_of
from memplan.plan import FIELDS
from memplan.precisions import PRECISIONS
from memplan.schedules import SCHEDULES
from memplan.units import TB, TFLOP, GiB
from memplan.unmodelled import ROWS
from pages.markdown import code, plain, rounded, table
from pages.refusals import refusals_page

API: Final = {
    "One plan": ("estimate", "Estimate", "StageEstimate", "Plan", "budget", "Budget"),
    "Many plans": (
        "search", "Found", "compare", "why", "advise", "Advice", "Change",
        "smallest_cluster", "longest_sequence", "largest_model",
    ),
    "Models": (
        "preset", "preset_names", "model_from_config", "trace", "parameter_count",
        "Model", "Gpt", "Llama", "TracedModel",
    ),
    "GPUs and clusters": ("cluster", "gpu", "gpu_names", "Cluster", "Gpu", "Link", "Interval", "Verdict"),
    "Out of memory": ("explain_oom", "OomReport"),
    "Errors": ("MemplanError", "InvalidValue", "UnknownName", "PlanRefused", "MissingRule"),
}  # fmt: skip
"""The public names in groups; one that is in none is shown last, so that no name is left out."""


def gpus_page() -> str:
    """The GPUs known by name."""
    known = [memplan.gpu(name) for name in memplan.gpu_names()]
    confirmed = ENGINES.named("torch").confirmed_gpus
    rows = [
        (
            code(each.name),
            each.title,
            rounded(each.memory_bytes, GiB, 0),
            rounded(each.usable_bytes, GiB, 2),
            rounded(each.memory_bytes_per_s, TB, 2),
            rounded(each.bf16_flops_per_s, TFLOP, 0),
            f"{each.link.name}, {rounded(each.link.bytes_per_s, 10**9, 0)}",
            "yes" if each.name in confirmed else "",
        )
        for each in known
    ]
    head = (
        "name", "GPU", "GiB", "usable GiB", "TB/s", "bf16 TFLOP/s", "link, GB/s one way",
        "checked without a GPU",
    )  # fmt: skip
    sources = table(("name", "source"), [(code(each.name), plain(each.source)) for each in known])
    return f"""# GPUs

The GPUs known by name (`memplan gpus`). Usable is the least that PyTorch was seen to report. Rates are peak
and dense. *Checked without a GPU*: PyTorch's own CUDA software ran plans for this GPU, and memplan's bytes
were compared with its own.

{table(head, rows, "23456")}

## Sources

{sources}
"""


def models_page() -> str:
    """The models known by name."""
    models = [memplan.preset(name) for name in memplan.preset_names()]
    rows = []
    for model in models:
        sizes = model.sizes() | {"n_layers": model.n_blocks}
        codes = dict.fromkeys((model.implementation, *implementations_of(model)))
        rows.append(
            (
                code(model.name),
                f"{memplan.parameter_count(model):,}",
                *(sizes.get(name, "-") for name in ("n_layers", "d_model", "max_seq_len")),
                *divisions(model).values(),
                ", ".join(codes),
            )
        )
    head = ("name", "parameters", "layers", "d_model", "context", "zero", "tp", "pp", "whose code")
    sources = table(
        ("name", "source"), [(code(model.name), plain(preset_source(model.name))) for model in models]
    )
    return f"""# Models

The models known by name (`memplan models`). Any repository's `config.json` and any module of your own is a
model too: see [names](names.md). `zero`, `tp` and `pp` say how plans may divide the model as the code named
first trains it: the ZeRO stages, the most tensor-parallel ranks and the most pipeline ranks.

{table(head, rows, "1234")}

## Sources

{sources}
"""


def values_of(field: Field) -> str:
    """The values that a field of a plan takes, in words."""
    match field:
        case Choice() | Registered():
            return ", ".join(map(code, field.choices))
        case Flag():
            return "`True`, `False`"
        case Count():
            return f"{field.least} to {field.most:,}" if field.most < 1000 else f"{field.least} or more"
        case Counts():
            return "whole numbers"
        case Number():
            return "a number above 0"
        case _:
            return "a name"


def fields_table(fields: Mapping[str, Field], defaults: Mapping[str, Any]) -> str:
    """One row for each field: keyword, meaning, values, default."""
    rows = [
        (
            code(name),
            plain(field.help),
            values_of(field),
            "" if defaults[name] in (None, "") else code(defaults[name]),
        )
        for name, field in fields.items()
    ]
    return table(("keyword", "meaning", "values", "default"), rows)


def defaults_of(kind: Any) -> dict[str, Any]:
    """The defaults of a dataclass's fields."""
    return {name: field.default for name, field in kind.__dataclass_fields__.items()}


def plan_page() -> str:
    """A plan's fields, precisions, schedules, and what is not modelled yet."""
    asked = {name: each.default for name, each in signature(memplan.estimate).parameters.items()}
    axes = [(code(axis), plain(AXES.named(axis).text)) for axis in AXES.own]
    axes += [(code(name), plain(view.text)) for name, view in VIEWS.items()]
    kinds = ("stored", "compute", "gather", "reduce", "accumulate")
    precisions = [
        (
            code(name),
            *(getattr(PRECISIONS.named(name), kind).name for kind in kinds),
            "yes" if PRECISIONS.named(name).loss_scaled else "",
            "yes" if PRECISIONS.named(name).autocast else "",
        )
        for name in PRECISIONS.own
    ]
    schedules = [
        (
            code(name),
            code(SCHEDULES.named(name).runs_as.partition(":")[2]),
            SCHEDULES.named(name).stages_per_rank or "any",
            "yes" if SCHEDULES.named(name).splits_backward else "",
        )
        for name in SCHEDULES.own
    ]
    missing = [(plain(row.what), plain(f"It {row.change}."), plain(f"{row.meanwhile}.")) for row in ROWS]
    return f"""# A plan's fields

Each field is a keyword of `memplan.estimate`, and with dashes a flag of `memplan estimate`: `micro_batch=2`
is `--micro-batch 2`. [What options mean](options.md) says more.

{fields_table(FIELDS, asked)}

## Axes of the mesh

Outermost first; the world is their product, and `ep` divides the dp x tp ranks anew.

{table(("axis", "meaning"), axes)}

## Precisions

The type of weights between steps and of optimizer state, of products, of gathered weights, of reduced
gradients, and of gradients kept from micro-batch to micro-batch.

{table(("name", *kinds, "scaled loss", "autocast"), precisions)}

## Pipeline schedules

{table(("name", "PyTorch's class", "stages on a rank", "splits backward"), schedules)}

## Not modelled yet

Each is known by its name: asking for it says what it would change, and what to use meanwhile.

{table(("what", "what it would change", "meanwhile"), missing)}
"""


def engines_page() -> str:
    """The options of each engine."""
    parts = []
    for name in ENGINES.own:
        engine = ENGINES.named(name)
        doc = (type(engine).__doc__ or "").strip().partition("\n")[0]
        fields = option_fields(name)
        shown = (
            fields_table(fields, defaults_of(engine.options)) if fields else "It has no options of its own."
        )
        axes = ", ".join(map(code, (*engine.axes, *engine.views))) or "none"
        parts.append(f"## `{name}`\n\n{plain(doc)} It knows the axes {axes}.\n\n{shown}\n")
    return (
        "# Engines and their options\n\nAn engine is a framework that is played. Its options are keywords "
        "and flags beside a plan's (`memplan estimate --engine NAME -h`).\n\n" + "\n".join(parts)
    )


def commands_page() -> str:
    """Every command's help."""
    parts = [f"## `memplan {name}`\n\n```{{run}}\nmemplan {name} -h\n```\n" for name in sorted(MODULES)]
    return (
        "# Commands\n\nEach command's own help. All of them take the same models, plans and clusters, and "
        "have `--json`.\n\n" + "\n".join(parts)
    )


def api_page() -> str:
    """The public names, from their docstrings."""
    grouped = {name for names in API.values() for name in names}
    groups = API | {"Others": tuple(name for name in memplan.__all__ if name not in grouped)}
    parts = []
    for title, names in groups.items():
        if names:
            shown = "\n".join(f".. auto{_object_kind(name)}" for name in names)
            parts.append(f"## {title}\n\n```{{eval-rst}}\n{shown}\n```\n")
    charts = "\n".join(f".. autofunction:: memplan.plots.{name}\n" for name in plots.__all__)
    parts.append(f"## Charts\n\n`memplan.plots`; each returns a figure.\n\n```{{eval-rst}}\n{charts}\n```\n")
    return (
        "# Python\n\nWhat `import memplan` gives: values that are frozen, and functions of them.\n\n"
        + "\n".join(parts)
    )


def _object_kind(name: str) -> str:
    """The directive that shows a public name."""
    value = getattr(memplan, name)
    if name == "search":  # a package that can be called
        return "function:: memplan.search.search.search\n"
    if isinstance(value, type):
        members = "" if issubclass(value, Exception) else "\n   :members:"
        return f"{'exception' if issubclass(value, Exception) else 'class'}:: memplan.{name}{members}\n"
    return f"{'function' if callable(value) and hasattr(value, '__code__') else 'data'}:: memplan.{name}\n"


REFERENCE: Final[dict[str, Callable[[], str]]] = {
    "api": api_page,
    "commands": commands_page,
    "plan": plan_page,
    "engines": engines_page,
    "models": models_page,
    "gpus": gpus_page,
    "refusals": refusals_page,
}
"""The generated pages of the reference, by name."""
