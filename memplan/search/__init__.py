"""The best of all plans of a cluster, on the formulas of `memplan.estimate`.

The package is also its main function: `memplan.search(...)` calls `memplan.search.search.search`, so that the
name of the one does not hide the modules of the other.
"""

import sys
from inspect import signature
from types import ModuleType

from memplan.search import search
from memplan.search.questions import largest_model, longest_sequence, smallest_cluster
from memplan.search.search import Found, searched

__all__ = [
    "Found",
    "largest_model",
    "longest_sequence",
    "searched",
    "smallest_cluster",
]


class _CallablePackage(ModuleType):
    """A package that can be called."""

    __call__ = staticmethod(search.search)


__signature__ = signature(search.search)
sys.modules[__name__].__class__ = _CallablePackage
