"""`memplan compare`."""

import re
from typing import Any

import click

from memplan.cli.flags import cluster_options, count_option, implementation_option
from memplan.cli.output import print_json
from memplan.command import estimate_command
from memplan.comparison import compared_text, why
from memplan.engines.options import USUAL_ENGINE, plan_fields
from memplan.errors import InvalidValue, unknown_name
from memplan.estimate import estimate
from memplan.version import versioned


@click.command("compare")
@click.argument("model")
@click.argument("plan_a")
@click.argument("plan_b")
@implementation_option()
@cluster_options()
@count_option("--global-batch", "Sequences per step.", required=True)
@count_option("--seq-len", "Tokens per sequence; left out: the model's context.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
def command(model: str, plan_a: str, plan_b: str, *, as_json: bool, **asked: Any) -> None:
    """Which of two plans is better, and why.

    A plan is fields and values, as in "tp=8,pp=4,zero=1,recompute=full"; dp is what the cluster has left.
    """
    a, b = (estimate(model, **{**asked, **fields_of(text)}) for text in (plan_a, plan_b))
    if as_json:
        plans = {
            name: each.to_dict() | {"command": estimate_command(each, model)}
            for name, each in (("a", a), ("b", b))
        }
        print_json(versioned({**plans, "why": why(a, b)}))
    else:
        click.echo(compared_text(a, b, model))


def fields_of(text: str) -> dict[str, Any]:
    """The fields of a plan, as text. What begins with a digit is no name, and belongs to the value before it.

    >>> fields_of("tp=8,recompute=full,sequence_parallel,layers_per_stage=3,5")
    {'tp': 8, 'recompute': 'full', 'sequence_parallel': True, 'layers_per_stage': (3, 5)}

    Raises:
        UnknownName: a name that is no field of a plan.
        InvalidValue: a field with two values.
    """
    parts = [part.partition("=") for part in filter(None, re.split(r"[,\s]+(?![\d+,\s])", text))]
    pairs = [(name.replace("-", "_"), value) for name, _, value in parts]
    said = dict(pairs)
    for name, value in pairs:
        if said[name] != value:
            raise InvalidValue(f"{name} has two values, {value!r} and {said[name]!r}; use one of them.")
    known = plan_fields(said.get("engine", USUAL_ENGINE))
    for name in said:
        if name not in known:
            raise unknown_name("field of a plan", name, known)
    return {name: known[name].parsed(value) for name, value in said.items()}
