"""What holds for all tests: records are checked, the garbage collector is tamed, and traces are kept nowhere.

But for those of models with adapters that records on file need, which come with the project.

The parametrised tests are millions of objects that are kept to the end.
"""

import gc
from functools import partial

import pytest

from memplan.engines import base
from memplan.tracing import cache
from validate.adapted import on_file


def pytest_configure() -> None:
    """Check every record, and collect the tests without full passes over those collected so far."""
    base.CHECKS_OWN = True
    gc.disable()


@pytest.fixture(autouse=True)
def cache_entry(monkeypatch):
    """Every trace is on file, or made anew and kept nowhere; what names entries, for a test of the cache."""
    named = cache._entry
    monkeypatch.setattr(cache, "_traced", partial(on_file, traced=cache._traced))
    monkeypatch.setattr(cache, "_entry", lambda *_: None)
    return named


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Take what is there out of all later passes, each of which would take seconds of some test's time."""
    gc.freeze()
    gc.enable()
