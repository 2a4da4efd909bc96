"""What a collective sends: a figure for each kind, none by default."""

import pytest

from memplan.engines.base import ring_bytes
from memplan.errors import MissingRule


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_a_rank_of_an_all_to_all_sends_all_but_its_own_part(n):
    assert ring_bytes("all_to_all", 1000 * n, n) == 1000 * (n - 1)


@pytest.mark.parametrize("kind", ["all_to_some", "", "All_Reduce"])
def test_an_unknown_collective_is_refused(kind):
    with pytest.raises(MissingRule, match="no rule states what the collective"):
        ring_bytes(kind, 1000, 4)
