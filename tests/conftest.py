"""What holds for all tests: records are checked, traces are kept nowhere, and the garbage collector is tamed.

The parametrised tests are millions of objects that are kept to the end.
"""

import gc

import pytest

from memplan.engines import base
from memplan.tracing import cache


def pytest_configure() -> None:
    """Check every record, and collect the tests without full passes over those collected so far."""
    base.CHECKS_OWN = True
    gc.disable()


@pytest.fixture(autouse=True)
def cache_entry(monkeypatch):
    """Every trace is made anew, and kept nowhere; what names the entries, for a test of the cache."""
    named = cache._entry
    monkeypatch.setattr(cache, "_entry", lambda *_: None)
    return named


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Take what is there out of all later passes, each of which would take seconds of some test's time."""
    gc.freeze()
    gc.enable()
