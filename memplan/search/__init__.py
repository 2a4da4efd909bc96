"""Search: all plans of a cluster, ranked by the figures of `memplan.estimate`.

The package can be called: `memplan.search(...)` is `memplan.search.search.search(...)`. A function of the
package's name would hide its modules.
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
