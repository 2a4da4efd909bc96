"""The best of all plans of a cluster, on the formulas of `memplan.estimate`."""

from memplan.search.advise import Advice, Change, advise
from memplan.search.questions import largest_model, longest_sequence, smallest_cluster
from memplan.search.search import Found, search, searched
from memplan.search.why import why

__all__ = [
    "Advice",
    "Change",
    "Found",
    "advise",
    "largest_model",
    "longest_sequence",
    "search",
    "searched",
    "smallest_cluster",
    "why",
]
