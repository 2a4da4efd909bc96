"""Pages that are generated: reference tables from the package's own, chapters of the READMEs, notebooks.

`write` puts them beside the pages written by hand, in the folders `reference`, `concepts` and `validation`.
"""

import ast
import json
import lzma
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
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

ROOT: Final = Path(__file__).parents[1]

CHAPTERS: Final = {
    "memplan/README.md": {
        "does-it-fit": "concepts/verdicts",
        "how-it-works": "concepts/design",
        "times": "concepts/times",
        "how-a-search-works": "concepts/searching",
        "models-and-clusters": "reference/names",
        "your-own-module": "concepts/traces",
        "what-options-mean": "reference/options",
        "what-should-i-run": "concepts/commands",
        "from-a-plan-to-a-run": "concepts/launchers",
        "megatron": "concepts/megatron",
    },
    "validate/README.md": {
        "predicted-and-measured": "validation/quick",
        "how-far-to-trust-it": "validation/trust",
        "other-peoples-modules": "validation/modules",
        "others-gpus": "validation/published",
        "without-a-gpu": "validation/nogpu",
        "at-true-size-on-any-machine": "validation/true-size",
        "on-a-gpu": "validation/gpu",
        "a-suite-of-your-own": "validation/suites",
        "overnight-and-on-more-than-one-machine": "validation/overnight",
    },
}
"""The chapters of the READMEs that are pages here, by their headings' anchors."""

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


def write(docs: Path) -> None:
    """Write every generated page; one that has not changed keeps its date, and Sphinx does not read it."""
    made = {
        **{f"reference/{name}": page() for name, page in REFERENCE.items()},
        "validation/on-file": on_file(),
        **chapters(),
    }
    for name, text in made.items():
        path = docs / f"{name}.md"
        path.parent.mkdir(exist_ok=True)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
    snapshot = (ROOT / "tests" / "snapshots" / "went-on.pickle.xz").read_bytes()
    (docs / "howto" / "files" / "snapshot.pickle").write_bytes(lzma.decompress(snapshot))
    for notebook in sorted((ROOT / "notebooks").glob("*.ipynb")):
        shutil.copy2(notebook, docs / "concepts" / notebook.name)


# --- Markdown ---------------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Iterable[Sequence[object]], right: str = "") -> str:
    """A Markdown table; `right`: the columns of numbers, by their places."""
    lines = [list(map(str, row)) for row in rows]
    rules = ["--:" if str(i) in right else "---" for i in range(len(head))]
    cells = [list(head), rules, *([_cell(text) for text in line] for line in lines)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ") or "-"


def code(value: object) -> str:
    """A value as Markdown's code."""
    return f"`{value}`"


def plain(text: str) -> str:
    """A text of the package in Markdown: what stands in backticks stays, other marks lose their meaning."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(
        part if part.startswith("`") else re.sub(r"([*_<>\[\]|$~])", r"\\\1", part) for part in parts
    )


def rounded(value: float | None, unit: float, digits: int) -> str:
    """A figure in a unit, or nothing."""
    return "-" if value is None else f"{value / unit:,.{digits}f}"


# --- Reference --------------------------------------------------------------------------------------------


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
            return "a text"


def fields_table(fields: Mapping[str, Field], defaults: Mapping[str, Any]) -> str:
    """One row for each field: keyword, flag, values, default, meaning."""
    rows = [
        (
            code(name),
            code("--" + name.replace("_", "-")),
            values_of(field),
            "" if defaults[name] is None else code(repr(defaults[name])),
            plain(field.help),
        )
        for name, field in fields.items()
    ]
    return table(("keyword", "flag", "values", "default", "meaning"), rows)


def defaults_of(kind: Any) -> dict[str, Any]:
    """The defaults of a dataclass's fields."""
    return {name: field.default for name, field in kind.__dataclass_fields__.items()}


def plan_page() -> str:
    """A plan's fields, precisions, schedules, and what is not modelled yet."""
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

Each field is a keyword of `memplan.estimate` and a flag of `memplan estimate`. [What options
mean](options.md) says more.

{fields_table(FIELDS, defaults_of(memplan.Plan))}

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


# --- Refusals ---------------------------------------------------------------------------------------------

RAISED: Final = ("PlanRefused", "MissingRule")
PLACES: Final = {
    "memplan/plan.py": "Plans that contradict themselves",
    "memplan/engines/base.py": "Every engine",
    "memplan/engines/refusals.py": "Every engine",
    "memplan/engines/recorded.py": "Traced modules",
    "memplan/tracing": "Traced modules",
    "memplan/models": "Models",
    "memplan/ops": "Operations and kernels",
    "memplan/kernels.py": "Operations and kernels",
    "memplan/search": "Searches",
    "memplan/launchers": "Files of other programs",
    "memplan/engines/textbook.py": "Engine `textbook`",
    **{f"memplan/engines/{name}": f"Engine `{name}`" for name in ("torch", "deepspeed", "megatron")},
}
"""Whose refusals those of a module are, by the start of its path; the last that fits counts."""
WAY_OUT: Final = re.compile(
    r"[;:,] (?=(?:use|leave|name|make|freeze|give|take|trace|add|say|pad|plan|set|move|write|try|choose)\b)"
)
"""Where the way out of a refusal's sentence begins."""


def refusals_page() -> str:
    """Every refusal of the code: what is refused, what it says, its way out."""
    found: dict[str, dict[str, tuple[str, str]]] = {}
    for path in sorted((ROOT / "memplan").rglob("*.py")):
        name = str(path.relative_to(ROOT))
        places = [title for start, title in PLACES.items() if name.startswith(start)]
        for kind, text in refusals_of(path):
            found.setdefault(places[-1] if places else "Others", {}).setdefault(kind, _said(text))
    parts = []
    for place in dict.fromkeys([*PLACES.values(), "Others"]):
        if rows := found.get(place):
            terms = [
                f"{plain(kind[:1].upper() + kind[1:])}\n: {plain(says)}."
                + (f"\n: *Way out:* {plain(way_out)}" if way_out else "")
                for kind, (says, way_out) in rows.items()
            ]
            parts.append(f"## {place}\n\n" + "\n\n".join(terms) + "\n")
    n, rules = sum(map(len, found.values())), "\n".join(parts)
    return f"""# Refusals

What memplan refuses rather than guess: {n} rules, read from the code that raises them. A rule names the
value, the reason and a way out; `…` stands for values of the plan. A *plan that cannot run* is refused in
the framework's own words. What has *no rule yet* is refused too: nothing is assumed about it.

`memplan search` counts refused plans by these reasons, and `python -m validate sweep --suite refused
--anyway` runs such plans all the same, to hear what PyTorch says: see [below](#what-pytorch-says).

{rules}
## What PyTorch says

Plans that memplan refuses, run on CPU ranks all the same (`data/measurements/refused.jsonl`).

{table(("plan", "memplan", "PyTorch"), _run_anyway())}
"""


def _run_anyway() -> Iterator[tuple[str, str, str]]:
    for row in _lines(ROOT / "data/measurements/refused.jsonl"):
        yield row["case"]["name"], plain(row["reason"]), plain(row.get("anyway", ""))


def _said(text: str) -> tuple[str, str]:
    """A refusal's sentence and its way out."""
    cuts = list(WAY_OUT.finditer(text))
    if not cuts:
        return text.rstrip("."), ""
    cut = cuts[0]
    return text[: cut.start()].rstrip("."), text[cut.end() :]


def refusals_of(path: Path) -> Iterator[tuple[str, str]]:
    """The kind and the text of each refusal that a module can raise, with `…` for values."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
        named = {
            target.id: node.value
            for node in ast.walk(function)
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in RAISED:
                text = template(node.args[0], named)
                kinds = [template(key.value, named) for key in node.keywords if key.arg == "kind"]
                if re.search(r"\w{3}", text):
                    yield (kinds[0] if kinds else text.partition(";")[0]), text


def template(node: ast.expr, named: Mapping[str, ast.expr]) -> str:
    """A text's expression as the text, with `…` for what is not in the source."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(template(value, named) for value in values)
        case ast.FormattedValue(value=ast.Name(id=name)) if isinstance(
            named.get(name), ast.Constant | ast.JoinedStr
        ):
            return template(named[name], {})
        case ast.Name(id=name) if isinstance(named.get(name), ast.Constant | ast.JoinedStr):
            return template(named[name], {})
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return template(left, named) + template(right, named)
        case ast.FormattedValue(value=ast.Constant(value=value)):
            return str(value)
        case _:
            return "…"


# --- Validation -------------------------------------------------------------------------------------------

SUITES: Final = {
    "quick": "memplan's own modules, every kind of plan",
    "drawn": "plans drawn at random",
    "matrix": "every pair of options",
    "models": "every model known by name, in small",
    "families": "transformers' decoders beside memplan's families",
    "architectures": "transformers' language models, traced",
    "wild": "other people's modules",
    "divided": "transformers' modules over tensor ranks",
    "experts": "transformers' mixtures of experts over expert ranks",
    "context": "transformers' modules over context ranks",
    "fsdp1": "FullyShardedDataParallel",
    "deepspeed": "DeepSpeed's ZeRO-0 to 3",
    "fullsize": "single ranks at true size, on tensors without data",
    "gpu-standin": "single ranks of 8 to 1,024, the others played",
    "standin": "single ranks of large worlds",
    "single": "one GPU",
    "nccl": "2 to 8 ranks with NCCL",
    "shared": "several ranks on one GPU",
    "allocator": "the caching allocator's settings",
    "frontier": "the largest that runs, and the smallest that does not",
    "published": "published runs of torchtitan",
}
"""What the files of records are about, by the suite in their names."""


def on_file() -> str:
    """What was confirmed by what: one row for each file of records."""
    folder = ROOT / "data" / "measurements"
    cpu = [_file_row(path, path.stem) for path in sorted(folder.glob("*.jsonl")) if path.stem != "refused"]
    cpu += [_file_row(path, path.stem) for path in sorted((folder / "releases").glob("*.jsonl"))]
    nogpu = [_file_row(path, f"nogpu/{path.stem}") for path in sorted((folder / "nogpu").glob("*.jsonl"))]
    head = ("file", "what", "cases", "ranks", "exact", "median", "worst")
    return f"""# What is on file

Three kinds of truth, never mixed. *CPU ranks* run everything for real, on small models. *nogpu* is
PyTorch's real CUDA software without a GPU, at true size: bytes, no times. *Published* are GPU runs that
others measured. memplan's authors have measured nothing on a GPU.

Each row is a file of `data/measurements`, as it stands. *Exact* are the cases whose weights, gradients,
optimizer state and collectives equal the prediction to the byte. Median and worst are of the peak's error,
each case's rank that is farthest off.

## CPU ranks

{table(head, cpu, "23456")}

## CUDA's software without a GPU

The peak is of the bytes that tensors ask for. What the allocator reserves is compared [rank by
rank](nogpu.md).

{table(head, nogpu, "23456")}

## Published GPU runs

What others measured on GPUs, source by source. Rows that ran as memplan can express them count; rows with
something else besides (`torch.compile`, float8, ...) are shown and never counted.

```{{run}}
:ellipsis: 0,-4
python -m validate published
```

NVIDIA's own bytes of Megatron-Core:

```{{run}}
:ellipsis: 0,-4
python -m validate published --engine megatron
```
"""


def _file_row(path: Path, name: str) -> tuple[str, ...]:
    """A file's cases and ranks, how many are exact, the median and the worst error of a peak."""
    rows = list(_lines(path))
    ran = [row for row in rows if row.get("peak_error") is not None]
    errors = [abs(row["peak_error"]) for row in ran]
    exact = sum(row["states_off_bytes"] == row["collectives_off"] == 0 for row in ran)
    ranks = sum(row["measured"]["ranks"]["n"] for row in ran)
    suite = max((suite for suite in SUITES if suite in name), key=len, default="")
    return (
        code(name),
        SUITES.get(suite, ""),
        f"{len(ran):,}",
        f"{ranks:,}",
        f"{exact:,}",
        f"{median(errors):.5%}" if errors else "-",
        f"{max(errors):.3%}" if errors else "-",
    )


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file, as they stand."""
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if "case" in row:
            yield row


# --- Chapters of the READMEs ------------------------------------------------------------------------------


LINK: Final = r"\[([^]]+)\]\(([^)#\s]*)(?:#([^)]*))?\)"


def chapters() -> dict[str, str]:
    """Chapters of the READMEs as pages, with links between them."""
    found = {}
    for file, pages in CHAPTERS.items():
        text = (ROOT / file).read_text(encoding="utf-8")
        for chapter in re.split(r"^(?=## )", text, flags=re.MULTILINE)[1:]:
            heading = chapter.partition("\n")[0]
            if page := pages.get(anchor(heading.removeprefix("## "))):
                raised = re.sub(r"^#(#+ )", r"\1", chapter, flags=re.MULTILINE)
                found[page] = re.sub(LINK, partial(_link, file=file), raised)
    absent = {page for pages in CHAPTERS.values() for page in pages.values()} - set(found)
    if absent:
        raise ValueError(f"chapters that no README has: {', '.join(sorted(absent))}")
    return found


def anchor(heading: str) -> str:
    """What a heading is linked by."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _link(link: re.Match[str], file: str) -> str:
    """A link of a README as one of these pages; the text alone if what it leads to is no page here."""
    text, path, heading = link.groups()
    if path.startswith("http"):
        return link[0]
    target = str(((ROOT / file).parent / path).resolve().relative_to(ROOT)) if path else file
    page = CHAPTERS.get(target, {}).get(heading or "")
    if page is None and target == "validate/README.md" and heading == "nvidias-own-bytes-of-megatron-core":
        return f"[{text}](/validation/published.md#{heading})"
    return f"[{text}](/{page}.md)" if page else text


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
