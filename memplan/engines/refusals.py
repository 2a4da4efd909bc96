"""Refusals that engines share: each raises for a plan that cannot run on a model.

Each raises with the value, the rule that it breaks and a way out. What one engine alone refuses is in its own
folder; `memplan.engines.checks` asks all that apply to a plan.
"""

from collections.abc import Iterable, Mapping
from math import gcd

from memplan.errors import MissingRule, PlanRefused, divisors_text
from memplan.models import Model, TracedModel
from memplan.plan import Plan


def check_modelled(engine: str, framework: str, rows: Iterable[tuple[bool, str, str]]) -> None:
    """Raise for what has no rule in an engine; a row: whether it is asked for, what, and what to use."""
    for what, other in [(what, other) for asked, what, other in rows if asked]:
        raise MissingRule(
            f"{what} has no rule in engine={engine!r} yet; use {other}.",
            kind=f"an option of {framework} that has no rule yet",
        )


def trained_whole(model: Model) -> tuple[tuple[bool, str, str], ...]:
    """The rows of `check_modelled` for models of which some weights get no gradient."""
    frozen, unused = (model.frozen, model.unused) if isinstance(model, TracedModel) else ((), ())
    whole = "a model that is trained whole"
    return (
        (bool(frozen), f"{model.name}, of which a part is frozen,", whole),
        (bool(unused), f"{model.name}, whose {min(unused, default='')} gets no gradient,", whole),
    )


def check_beside(named: str, kind: str, without: str, rows: Iterable[tuple[bool, str, str]]) -> None:
    """Raise for what has no rule beside a value.

    `named`: the value; `without`: the plan's word for none of it. A row: whether it is asked for, what, and
    what to use.
    """
    for what, other in [(what, other) for asked, what, other in rows if asked]:
        raise MissingRule(
            f"{named} with {what} has no rule yet; use {other}, or {without}.",
            kind=f"{kind} with {what.partition('=')[0]}",
        )


def check_positions(model: Model, plan: Plan) -> None:
    """Raise if the sequence is longer than the table of learned positions."""
    longest = model.longest_seq_len
    if longest is not None and plan.seq_len > longest:
        raise PlanRefused(
            f"seq_len={plan.seq_len} is longer than max_seq_len={longest}, the table of learned "
            f"positions of {model.name}; use {longest} or less.",
            kind="sequences longer than the table of learned positions",
        )


def check_divided(plan: Plan, sizes: Mapping[str, int], otherwise: str = "") -> None:
    """Raise if the tensor axis does not divide one of a model's sizes.

    `otherwise`: another way out than a different `tp`, as text.
    """
    for name, total in sizes.items():
        if total % plan.tp:
            shared = gcd(*sizes.values())
            choices = f"one of {divisors_text(shared)}" if shared > 1 else "tp=1"
            raise PlanRefused(
                f"tp={plan.tp} does not divide {name}={total}; use {choices}{otherwise}.",
                kind="tp does not divide the heads, d_ff or the vocabulary",
            )


def check_sequence(model: Model, plan: Plan) -> None:
    """Raise if the tensor axis does not divide the sequence under sequence parallelism."""
    if plan.sequence_parallel and plan.seq_len % plan.tp:
        divisible = -(-plan.seq_len // plan.tp) * plan.tp
        if model.longest_seq_len is not None:
            divisible = min(divisible, model.longest_seq_len // plan.tp * plan.tp)
        raise PlanRefused(
            f"sequence_parallel=True needs tp={plan.tp} to divide seq_len={plan.seq_len}; use "
            f"{f'seq_len={divisible}' if divisible else 'sequence_parallel=False'}.",
            kind="tp does not divide the sequence under sequence parallelism",
        )


def check_layers(model: Model, plan: Plan) -> None:
    """Raise if the model's blocks cannot be divided over the pipeline's stages."""
    if plan.virtual_stages > 1 and plan.pp == 1:
        raise PlanRefused(
            f"virtual_stages={plan.virtual_stages} are stages of a pipeline, but pp=1; use pp of 2 or more, "
            "or virtual_stages=1.",
            kind="virtual stages without a pipeline",
        )
    stages = f"pp={plan.pp}"
    if plan.virtual_stages > 1:
        stages = f"pp x virtual_stages = {plan.pp} x {plan.virtual_stages} = {plan.n_stages}"
    if plan.layers_per_stage is None:
        most = model.n_blocks
        if plan.pp > max(most, 1):
            raise PlanRefused(
                f"pp={plan.pp} is more than n_layers={most}; use at most {most}.",
                kind="more pipeline stages than layers",
            )
        if plan.n_stages > max(most, 1):
            raise PlanRefused(
                f"{stages} is more than n_layers={most}; use virtual_stages={most // plan.pp} or smaller "
                "degrees.",
                kind="more pipeline stages than layers",
            )
        return
    given = f"layers_per_stage={plan.layers_per_stage}"
    if len(plan.layers_per_stage) != plan.n_stages:
        raise PlanRefused(
            f"{given} names {len(plan.layers_per_stage)} stages, but {stages}; name {plan.n_stages}.",
            kind="layers_per_stage for another number of stages",
        )
    if sum(plan.layers_per_stage) != model.n_blocks:
        raise PlanRefused(
            f"{given} adds up to {sum(plan.layers_per_stage)} blocks, but n_layers={model.n_blocks}; "
            f"make it add up to {model.n_blocks}.",
            kind="layers_per_stage for another number of layers",
        )
    _check_empty_stages(plan, plan.layers_per_stage)


def _check_empty_stages(plan: Plan, layers: tuple[int, ...]) -> None:
    """Raise for a stage between the ends without blocks: it would have no weights."""
    empty = [stage for stage in range(1, plan.n_stages - 1) if not layers[stage]]
    for rank in range(plan.pp):
        if set(plan.stages_of(rank)) <= set(empty):
            raise PlanRefused(
                f"layers_per_stage={layers} leaves rank {rank} of the pipeline without weights ('optimizer "
                "got an empty parameter list'); give it at least 1 block, or use fewer pp.",
                kind="a pipeline rank without weights",
            )
    if empty:
        raise MissingRule(
            f"layers_per_stage={layers} leaves stage {empty[0]} without blocks, which only the first and the "
            "last stage have a rule for; give it at least 1.",
            kind="a middle stage without blocks, which has no rule",
        )
