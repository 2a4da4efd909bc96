"""A page with an example picture of every chart, on a page and on a slide, and the lines that draw it.

`python -m tests.gallery FOLDER` writes it; with names of charts, their slides alone.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from html import escape
from inspect import getdoc, getsource
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING, Any, Final

import memplan
from memplan import plots
from memplan.plots.style import SLIDE_DPI

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI: Final = 213
"""Dots per inch of a picture: 1,917 pixels in width, as a slide."""


def _compare() -> "Figure":
    zeros = {
        f"zero={zero}": memplan.estimate("llama-3-8b", cluster="8xh100-sxm", zero=zero, seq_len=4096)
        for zero in (0, 1, 2, 3)
    }
    return plots.compare(zeros)


def _front() -> "Figure":
    found = memplan.search(
        "llama-3-8b", cluster="8xh100-sxm", global_batch=64, seq_len=8192, objective="front", keep=8
    )
    return plots.front(found)


def _frontier() -> "Figure":
    models = ("gpt2-xl", "llama-2-7b", "llama-2-13b", "qwen2.5-32b", "llama-3-70b", "gpt3-175b")
    lines: dict[str, list[memplan.Estimate]] = {"DDP": [], "ZeRO-3, recompute": []}
    for n in (8, 16, 32, 64):
        job: Any = {
            "cluster": f"{n}xh100-sxm",
            "global_batch": n,
            "seq_len": 1024,
            "tp": 1,
            "pp": 1,
            "dp_replicate": 1,
            "keep": 1,
        }
        sharded = memplan.largest_model(models, zero=3, recompute="full", offload=False, **job)
        copied = memplan.largest_model(models, zero=0, **job)
        lines["ZeRO-3, recompute"] += filter(None, [sharded.best])
        lines["DDP"] += filter(None, [copied.best])
    return plots.frontier(lines)


def _ledger_at_peak() -> "Figure":
    return plots.ledger_at_peak(memplan.estimate("llama-3-8b", cluster="8xh100-sxm", zero=3, seq_len=4096))


def _predicted_beside_measured() -> "Figure":
    cases = {"dp2": (1000, 1001), "tp2, sequence parallel": (740, 740), "pp2 1f1b": (810, 790)}
    ranks = {name: [[{"peak_bytes": n * 10_000}] for n in pair] for name, pair in cases.items()}
    records = [
        {
            "case": {"name": name},
            "outcome": "ok",
            "predicted": {"ranks": ahead},
            "measured": {"ranks": seen},
        }
        for name, (ahead, seen) in ranks.items()
    ]
    return plots.predicted_beside_measured(records)


def _ring_all_reduce() -> "Figure":
    return plots.ring_all_reduce(4)


def _schedule() -> "Figure":
    planned = memplan.estimate(
        "llama-2-7b", cluster="4xh100-sxm", pp=4, schedule="1f1b", global_batch=8, seq_len=4096
    )
    return plots.schedule(planned)


def _stage_peaks() -> "Figure":
    planned = memplan.estimate(
        "llama-2-7b", cluster="4xh100-sxm", pp=4, schedule="1f1b", global_batch=8, seq_len=4096
    )
    return plots.stage_peaks(planned)


def _step_time() -> "Figure":
    job: Any = {"cluster": "16xh100-sxm", "zero": 3, "global_batch": 64, "recompute": "full"}
    plans = {f"tp={tp}": memplan.estimate("llama-3-8b", tp=tp, **job) for tp in (1, 2, 8)}
    return plots.step_time(plans)


def _step_timeline() -> "Figure":
    return plots.step_timeline(memplan.estimate("llama-3-8b", cluster="8xh100-sxm", zero=3, seq_len=4096))


def _sweep() -> "Figure":
    longer = [
        memplan.estimate("llama-3-8b", cluster="8xh100-sxm", zero=3, seq_len=n)
        for n in range(1024, 16385, 1024)
    ]
    return plots.sweep("seq_len", longer)


EXAMPLES: Final[Mapping[str, Callable[[], "Figure"]]] = {
    "stage_peaks": _stage_peaks,
    "compare": _compare,
    "step_timeline": _step_timeline,
    "ledger_at_peak": _ledger_at_peak,
    "sweep": _sweep,
    "schedule": _schedule,
    "step_time": _step_time,
    "front": _front,
    "frontier": _frontier,
    "ring_all_reduce": _ring_all_reduce,
    "predicted_beside_measured": _predicted_beside_measured,
}
"""An example of each chart, by the name of its function."""

PAGE: Final = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>memplan.plots</title>
<style>body {{ font-family: sans-serif; max-width: 60rem; margin: 2rem auto }} img {{ width: 100% }}
pre {{ background: #f4f4f4; padding: 0.8rem; overflow-x: auto }}</style>
<h1>memplan.plots</h1>
{entries}
</html>
"""


def gallery(folder: Path, examples: Mapping[str, Callable[[], "Figure"]] = EXAMPLES) -> Path:
    """Write a page with a picture of each example, and the pictures beside it; the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    for name, draw in examples.items():
        figure = draw()
        figure.savefig(folder / f"{name}.png", dpi=DPI)
        plots.slide(figure).savefig(folder / f"{name}-slide.png", dpi=SLIDE_DPI)
        what = (getdoc(getattr(plots, name)) or "").partition("\n")[0]
        code = dedent(getsource(draw).partition("\n")[2]).replace("return ", "")
        entries.append(
            f'<h2 id="{name}">plots.{name}</h2>\n<p>{escape(what)}</p>\n'
            f'<img src="{name}.png" alt="{escape(what)}">\n<pre>{escape(code)}</pre>\n'
            f'<p><a href="{name}-slide.png">The same on a slide</a>: <code>plots.slide(figure)</code></p>'
        )
    page = folder / "index.html"
    page.write_text(PAGE.format(entries="\n".join(entries)), encoding="utf-8")
    return page


def slides(folder: Path, names: Iterable[str]) -> None:
    """Write the named examples as slides, without a page."""
    for name in names:
        plots.slide(EXAMPLES[name]()).savefig(folder / f"{name}.png", dpi=SLIDE_DPI)


if __name__ == "__main__":
    folder, *names = sys.argv[1:] or ["gallery"]
    if names:
        slides(Path(folder), names)
    else:
        print(gallery(Path(folder)))
