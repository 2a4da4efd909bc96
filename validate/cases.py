"""Which configurations are run: plain lists, named suites."""

from dataclasses import dataclass

from memplan import Model, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One plan for one model, to be run and compared.

    `steps` are optimizer steps in all (at least 4: two to warm up, one whose collectives are counted, one
    whose memory is), `timeout_s` the seconds after which the ranks are killed.
    """

    name: str
    model: Model
    plan: Plan
    steps: int = 5
    learning_rate: float = 0.0
    """0: the suite's choice for the optimizer."""
    seed: int = 1234
    timeout_s: float = 120.0
