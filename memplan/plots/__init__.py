"""Charts of estimates, searches and records: every function returns a matplotlib Figure and keeps no state.

In a notebook `%matplotlib inline` shows a returned Figure; `slide(figure)` lays it out for a talk.
"""

from memplan.errors import installed

with installed("a chart", "plots"):
    import matplotlib.figure  # noqa: F401 - every chart is one of its figures

from memplan.plots.measured import predicted_beside_measured
from memplan.plots.memory import compare, ledger_at_peak, stage_peaks, sweep
from memplan.plots.ring import ring_all_reduce
from memplan.plots.search import front, frontier
from memplan.plots.style import slide
from memplan.plots.time import schedule, step_time
from memplan.plots.timeline import step_timeline

__all__ = [
    "compare",
    "front",
    "frontier",
    "ledger_at_peak",
    "predicted_beside_measured",
    "ring_all_reduce",
    "schedule",
    "slide",
    "stage_peaks",
    "step_time",
    "step_timeline",
    "sweep",
]
