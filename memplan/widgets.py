"""Menus for notebooks: choose a plan's fields; see its memory, its step time and its flags."""

import os
from typing import TYPE_CHECKING, Any, Final

from memplan.checks import divisors
from memplan.command import command_text, estimate_command
from memplan.errors import MemplanError, installed
from memplan.estimate import device_of, estimate
from memplan.hardware import Cluster, resolve_cluster
from memplan.models import Model, resolve
from memplan.plan import RECOMPUTES
from memplan.plots import stage_peaks, step_time
from memplan.tables import verdict_text

if TYPE_CHECKING:
    from ipywidgets import VBox

MOST_MICRO_BATCH: Final = 8
"""The largest micro-batch in the menu."""


def planner(
    model: Model | str | os.PathLike[str],
    *,
    cluster: Cluster | str,
    global_batch: int,
    seq_len: int | None = None,
) -> "VBox":
    """Menus for the fields of a plan above its peak by stage, the time of its step, and its command line.

    Raises:
        MemplanError: if ipywidgets is not installed; as `memplan.estimate` for the model and the cluster.
    """
    with installed("a menu", "widgets"):
        import ipywidgets
    where = resolve_cluster(cluster)
    shape = resolve(model, device=device_of(where).type)
    n_gpus = 1 if where is None else where.n_gpus
    choices: dict[str, Any] = {
        "tp": [n for n in divisors(n_gpus) if not any(size % n for size in shape.sizes_over_tp.values())],
        "pp": [n for n in divisors(n_gpus) if n <= max(1, shape.n_blocks)],
        "zero": [3, 2, 1, 0],
        "recompute": list(RECOMPUTES),
        "micro_batch": [n for n in divisors(global_batch) if n <= MOST_MICRO_BATCH],
        "sequence_parallel": [False, True],
    }
    menus = {name: ipywidgets.Dropdown(options=values, description=name) for name, values in choices.items()}
    asked = {"cluster": where, "global_batch": global_batch, "seq_len": seq_len}
    name = None if isinstance(model, Model) else os.fspath(model)
    shown = ipywidgets.interactive_output(lambda **plan: _show(shape, name, asked | plan), menus)
    rows = [ipywidgets.HBox(list(menus.values())[start : start + 3]) for start in (0, 3)]
    return ipywidgets.VBox([*rows, shown])


def _show(model: Model, name: str | None, asked: dict[str, Any]) -> None:
    """Shows a plan's charts below the menus, or why it cannot run."""
    from IPython.display import display

    try:
        planned = estimate(model, **asked)
    except MemplanError as refusal:
        print(refusal)
        return
    print(verdict_text(planned))
    display(stage_peaks(planned))  # type: ignore[no-untyped-call]
    if planned.step_s is not None:
        display(step_time({str(planned.plan.mesh): planned}))  # type: ignore[no-untyped-call]
    if (command := estimate_command(planned, name)) is not None:
        print(command_text(command))
