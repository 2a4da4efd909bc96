"""Charts of estimates, searches and records: every function returns a matplotlib Figure and keeps no state.

In a notebook `%matplotlib inline` shows a returned Figure.
"""

from memplan.plots.measured import predicted_beside_measured
from memplan.plots.memory import compare, ledger_at_peak, stage_peaks, sweep
from memplan.plots.timeline import step_timeline

__all__ = [
    "compare",
    "ledger_at_peak",
    "predicted_beside_measured",
    "stage_peaks",
    "step_timeline",
    "sweep",
]
