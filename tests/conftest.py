"""The garbage collector leaves the parametrised tests alone: millions of objects that are kept to the end."""

import gc

import pytest


def pytest_configure() -> None:
    """Collect the tests without full passes over those collected so far."""
    gc.disable()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Take what is there out of all later passes, each of which would take seconds of some test's time."""
    gc.freeze()
    gc.enable()
