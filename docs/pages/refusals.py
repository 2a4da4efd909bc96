"""The page of refusals, read from the code that raises them."""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from memplan.mesh import AXES, VIEWS
from pages.markdown import plain, table
from pages.records import ROOT, records_of

RAISED: Final = ("PlanRefused", "MissingRule")
PLACES: Final = {
    "memplan/plan.py": "Plans that contradict themselves",
    "memplan/engines/base.py": "Every engine",
    "memplan/engines/refusals.py": "Every engine",
    "memplan/passes/recorded.py": "Traced modules",
    "memplan/tracing": "Traced modules",
    "memplan/models": "Models",
    "memplan/ops": "Operations and kernels",
    "memplan/kernels.py": "Operations and kernels",
    "memplan/search": "Searches",
    "memplan/launchers": "Files of other programs",
    "memplan/engines/textbook.py": "Engine `textbook`",
    **{
        f"memplan/engines/{name}": f"Engine `{name}`"
        for name in ("torch", "deepspeed", "fairscale", "colossalai", "megatron")
    },
}
"""The heading of a module's refusals, by the start of its path; the last matching entry is taken."""
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
                "\n: ".join(
                    [
                        plain(_capital(kind)),
                        *([f"{plain(_capital(says))}."] if not way_out or says != kind.rstrip(".") else []),
                        *([f"*Way out:* {plain(way_out)}."] if way_out else []),
                    ]
                )
                for kind, (says, way_out) in rows.items()
            ]
            parts.append(f"## {place}\n\n" + "\n\n".join(terms) + "\n")
    n, rules = sum(map(len, found.values())), "\n".join(parts)
    return f"""# Refusals

What memplan refuses rather than guess: {n} rules, read from the code that raises them. A rule names the
value, the reason and a way out; `⟨…⟩` stands for a value of the plan. A *plan that cannot run* is refused in
the framework's own words. What has *no rule yet* is refused too: nothing is assumed about it.

`memplan search` counts refused plans by these reasons, and `python -m validate sweep --suite refused
--anyway` runs such plans all the same, to hear what PyTorch says: see [below](#what-pytorch-says).

{rules}
## What PyTorch says

Plans that memplan refuses, run on CPU ranks all the same (`data/measurements/refused.jsonl`).

{table(("plan", "memplan", "PyTorch"), _run_anyway())}
"""


def _capital(text: str) -> str:
    """A sentence with a capital letter, unless a field's name begins it."""
    first = text.partition(" ")[0].rstrip(":")
    return (
        text if first in (*AXES.own, *VIEWS) or re.search(r"[=_⟨…]", first) else text[:1].upper() + text[1:]
    )


def _run_anyway() -> Iterator[tuple[str, str, str]]:
    for row in records_of(ROOT / "data/measurements/refused.jsonl"):
        yield row["case"]["name"], plain(row["reason"]), plain(row.get("anyway", ""))


def _said(text: str) -> tuple[str, str]:
    """A refusal's sentence and its way out."""
    cuts = list(WAY_OUT.finditer(text))
    if not cuts:
        return text.rstrip("."), ""
    cut = cuts[0]
    return text[: cut.start()].rstrip("."), text[cut.end() :].rstrip(".")


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
        case ast.FormattedValue(value=ast.Name(id=name) | ast.Attribute(attr=name)):
            return f"⟨{name.replace('_', ' ').strip().lower()}⟩"
        case _:
            return "…"
