"""No input from outside breaks a reader or a command; `make fuzz` tries twenty times as many."""

import pytest

from tests.fuzz import TARGETS, inputs_of, tried

N_INPUTS = 5_000
"""In all targets together; their seed is not that of `make fuzz`."""


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_hostile_inputs_are_refused_or_answered(target):
    n_inputs = inputs_of(target, N_INPUTS)
    outcome = tried(target, seed=1, first=0, n_inputs=n_inputs)
    assert not outcome.failures, outcome.failures[0]
    assert outcome.n_refused < n_inputs, "nothing was read: these inputs test the first check only"
