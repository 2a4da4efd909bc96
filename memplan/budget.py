"""The budget of a whole training: steps, days, GPU-hours, money and energy, from the time of one step."""

from dataclasses import dataclass
from typing import Any, Final, final

from memplan.checks import checked_count, checked_positive
from memplan.errors import InvalidValue, PlanRefused, shown_value
from memplan.estimate import Estimate
from memplan.models import has_sequence
from memplan.tables import counted_in, headline, verdict_text
from memplan.text_tables import html_text, text_table, wrapped
from memplan.version import versioned

TOKENS_PER_PARAMETER: Final = 20
"""Tokens per parameter of compute-optimal training, as a rule of thumb.

Source: Hoffmann et al. 2022, arXiv:2203.15556, Table 3: 20.0 (400M) to 22.4 (67B); Chinchilla itself, 70B and
1.4T tokens: 20.
"""

MOST_TOKENS: Final = 10**18
"""More tokens are taken for a mistake."""

HOUR_S: Final = 3600


def chinchilla_tokens(n_parameters: int) -> int:
    """Tokens to train on for the lowest loss of given compute: 20 a parameter.

    Assumes: compute is all that counts; a model that is used a lot is better smaller and trained for longer.
    Source: `TOKENS_PER_PARAMETER`.

    >>> chinchilla_tokens(70_000_000_000)
    1400000000000
    """
    return TOKENS_PER_PARAMETER * n_parameters


@final
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Budget:
    """The budget of training on `tokens` tokens by the step time of an estimate.

    `price_per_gpu_hour` and `cost` are in the same currency; None: no cost.

    Assumes: every step takes the estimate's time.
    Neglects: restarts, checkpoints, evaluation, data that comes late.
    """

    estimate: Estimate
    tokens: int
    step_s: float
    price_per_gpu_hour: float | None = None

    @property
    def n_gpus(self) -> int:
        """The number of GPUs."""
        return self.estimate.plan.world_size

    @property
    def step_tokens(self) -> int:
        """Tokens of a step: global_batch x seq_len."""
        return self.estimate.plan.global_batch * self.estimate.plan.seq_len

    @property
    def n_steps(self) -> int:
        """Steps, the last one full."""
        return -(-self.tokens // self.step_tokens)

    @property
    def training_s(self) -> float:
        """Seconds of all steps."""
        return self.n_steps * self.step_s

    @property
    def days(self) -> float:
        """Days of all steps."""
        return self.training_s / (24 * HOUR_S)

    @property
    def gpu_hours(self) -> float:
        """Hours of all steps x GPUs."""
        return self.training_s / HOUR_S * self.n_gpus

    @property
    def cost(self) -> float | None:
        """GPU-hours x the price of one; None without a price."""
        return None if self.price_per_gpu_hour is None else self.gpu_hours * self.price_per_gpu_hour

    @property
    def energy_kwh(self) -> float | None:
        """GPU-hours x the board's power; None where the GPU's is not known.

        Assumes: each board draws the most it may all the time.
        Neglects: processors, network, cooling.
        """
        cluster = self.estimate.cluster
        power_w = None if cluster is None else cluster.gpu.board_power_w
        return None if power_w is None else self.gpu_hours * power_w / 1000

    @property
    def chinchilla_tokens(self) -> int | None:
        """The model's compute-optimal tokens: `memplan.budget.chinchilla_tokens`; None without tokens."""
        return _optimal_tokens(self.estimate)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as `--json` prints them."""
        estimate = self.estimate
        return versioned(
            {
                "model": estimate.model.name,
                "n_parameters": estimate.n_parameters,
                "cluster": None if estimate.cluster is None else estimate.cluster.to_dict(),
                "plan": str(estimate.plan.mesh),
                "verdict": estimate.verdict,
                "tokens": self.tokens,
                "chinchilla_tokens": self.chinchilla_tokens,
                "n_steps": self.n_steps,
                "step_s": self.step_s,
                "days": self.days,
                "gpu_hours": self.gpu_hours,
                "price_per_gpu_hour": self.price_per_gpu_hour,
                "cost": self.cost,
                "energy_kwh": self.energy_kwh,
                "confidence": estimate.time_model.label,
            }
        )

    def __str__(self) -> str:
        return budget_text(self)

    def __repr__(self) -> str:
        cost = "" if self.cost is None else f", cost {self.cost:,.0f}"
        days = f"{self.days:,.1f} days, {self.gpu_hours:,.0f} GPU-hours"
        return f"<Budget of {self.tokens:,} tokens: {days}{cost}>"

    def _repr_html_(self) -> str:
        return html_text(str(self))


def budget(
    estimate: Estimate, *, tokens: float | None = None, price_per_gpu_hour: float | None = None
) -> Budget:
    """The budget of training with an estimate's plan: steps, days, GPU-hours, money and energy.

    Args:
        estimate: of a plan on a cluster whose rates are known.
        tokens: how many to train on, samples if the model's inputs have no sequence; left out, the model's
            compute-optimal tokens, 20 a parameter.
        price_per_gpu_hour: in any currency; left out, no cost.

    >>> import memplan
    >>> e = memplan.estimate("llama-3-8b", cluster="8xh100-sxm", zero=3)
    >>> memplan.budget(e, tokens=e.plan.seq_len * 8 * 1000).n_steps
    1000

    Raises:
        PlanRefused: an estimate that does not fit, which has no price.
        InvalidValue: a value that is no estimate, tokens that are no whole number, a price that is none, or
            an estimate without a step time; no tokens for a model whose inputs have none.
    """
    if not isinstance(estimate, Estimate):
        raise InvalidValue(f"{shown_value(estimate)} is no estimate; use memplan.estimate(...).")
    step_s = estimate.step_s
    if estimate.verdict == "does not fit":
        raise PlanRefused(
            f"{verdict_text(estimate)} So there is no budget of {estimate.model.name} with this plan; "
            "memplan.advise (memplan advise) says what would fit.",
            kind="a plan that does not fit has no price",
        )
    if step_s is None:
        raise InvalidValue(
            f"there is no step time to plan by: {'; '.join(estimate.time_missing)}; use a plan and a cluster "
            "that have one, as cluster='8xh100-sxm'."
        )
    asked = _optimal_tokens(estimate) if tokens is None else _checked_tokens(tokens)
    if asked is None:
        raise InvalidValue(
            f"the inputs of {estimate.model.name} have no tokens, of which alone it is known how many are "
            "compute-optimal; use the number of samples to train on, as tokens=1e9 (--tokens 1e9)."
        )
    return Budget(
        estimate=estimate,
        tokens=asked,
        step_s=step_s,
        price_per_gpu_hour=None
        if price_per_gpu_hour is None
        else checked_positive("price_per_gpu_hour", price_per_gpu_hour),
    )


def _optimal_tokens(estimate: Estimate) -> int | None:
    """The compute-optimal tokens of an estimate's model; None if its inputs have no sequence of tokens."""
    return chinchilla_tokens(estimate.n_parameters) if has_sequence(estimate.model) else None


def _checked_tokens(tokens: object) -> int:
    """A count that may be written as a float: 15e12."""
    whole = int(tokens) if isinstance(tokens, float) and tokens.is_integer() else tokens
    return checked_count("tokens", whole, most=MOST_TOKENS)


def budget_text(budget: Budget) -> str:
    """What `print(budget)` shows, in lines of at most 80 characters."""
    estimate, cluster = budget.estimate, budget.estimate.cluster
    counted, optimal = counted_in(estimate.plan.seq_len), budget.chinchilla_tokens
    optimally = f" times {TOKENS_PER_PARAMETER} a parameter (compute-optimal)"
    rows = [
        (
            counted,
            f"{budget.tokens:,}",
            "" if optimal is None else f"{budget.tokens / optimal:.2f}{optimally}",
        ),
        ("steps", f"{budget.n_steps:,}", f"of {budget.step_tokens:,} {counted}, {budget.step_s:.3g} s each"),
        ("days", f"{budget.days:,.1f}", "every step at the estimated time, no restarts"),
        ("GPU-hours", f"{budget.gpu_hours:,.0f}", f"{budget.n_gpus:,} GPUs"),
    ]
    if budget.cost is not None:
        rows.append(("cost", f"{budget.cost:,.0f}", f"{budget.price_per_gpu_hour:g} a GPU-hour"))
    if budget.energy_kwh is not None and cluster is not None:
        power = f"{cluster.gpu.board_power_w:g} W a board at most; GPUs alone"
        rows.append(("kWh", f"{budget.energy_kwh:,.0f}", power))
    head = f"{headline(estimate)}\n{wrapped(str(estimate.plan.mesh))}"
    return "\n\n".join([head, text_table(rows, "<><"), wrapped(estimate.time_model.label)])
