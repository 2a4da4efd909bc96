"""`memplan compare`."""

import re
from collections.abc import Container
from math import lcm
from typing import Any

import click

from memplan.cli.flags import (
    cluster_options,
    count_option,
    is_plan_flag,
    model_options,
    plan_of_flags,
)
from memplan.cli.output import print_json
from memplan.cli.own_module import model_of
from memplan.command import estimate_command
from memplan.comparison import compare, compared_text
from memplan.engines.options import USUAL_ENGINE, plan_fields
from memplan.errors import InvalidValue, unknown_name
from memplan.estimate import device_of, estimate
from memplan.hardware import resolve_cluster
from memplan.models import resolve
from memplan.plan import Plan
from memplan.text_tables import wrapped
from memplan.version import versioned


class CompareCommand(click.Command):
    """A command whose arguments may be plans written as flags, in one word: "--tp 8 --zero 3"."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own = {flag for option in self.get_params(ctx) for flag in option.opts}
        plans = [word for word in args if _is_plan(word, own)]
        if len(plans) > 2:
            flag = plans[2].partition(" ")[0]
            raise click.UsageError(
                f"{flag} is a plan's flag, and both plans are given; write it within the quotes of each, "
                f'as in "--tp 8 {flag} ...".',
                ctx,
            )
        return super().parse_args(ctx, [f" {word}" if _is_plan(word, own) else word for word in args])


def _is_plan(word: str, own: Container[str]) -> bool:
    """Whether a word is a plan as flags: click takes it for an argument if it begins with a space."""
    flag, _, others = word.partition(" ")
    return bool(others.strip() or flag not in own) and is_plan_flag(flag)


@click.command("compare", cls=CompareCommand)
@click.argument("model")
@click.argument("plan_a")
@click.argument("plan_b")
@model_options()
@cluster_options()
@count_option("--global-batch", "Sequences per step; left out: the least that both plans can divide.")
@count_option("--seq-len", "Tokens per sequence; left out: the model's context, at most 8192.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
def command(model: str, plan_a: str, plan_b: str, *, as_json: bool, **asked: Any) -> None:
    """Which of two plans is better, and why.

    MODEL is any that `memplan estimate` takes. A plan is its flags in quotes, as in "--tp 8 --pp 4 --zero 1
    --recompute full", or fields and values, as in "tp=8,pp=4,zero=1,recompute=full"; dp is what the cluster
    has left.
    """
    asked_of = [{**asked, **fields_of(text)} for text in (plan_a, plan_b)]
    default = Plan.__dataclass_fields__["precision"].default
    own = resolve(
        model_of(model),
        device=device_of(resolve_cluster(asked["cluster"])).type,
        precisions=[each.get("precision", default) for each in asked_of],
        cache=asked["cache"],
    )
    a, b = (estimate(own, **each) for each in asked_of)
    chosen = all(each["global_batch"] is None for each in asked_of)
    if chosen and a.plan.global_batch != b.plan.global_batch:
        common = lcm(a.plan.global_batch, b.plan.global_batch)
        a, b = (estimate(own, **{**each, "global_batch": common}) for each in asked_of)
    if as_json:
        plans = {
            name: each.to_dict() | {"command": estimate_command(each, model)}
            for name, each in (("a", a), ("b", b))
        }
        print_json(versioned({**plans, "why": compare(a, b)}))
        return
    click.echo(compared_text(a, b, model))
    if chosen:
        said = f"The batch was left out: {a.plan.global_batch} is the least that both plans can divide"
        click.echo(f"\n{wrapped(f'{said} (--global-batch).')}")


def fields_of(text: str) -> dict[str, Any]:
    """The fields of a plan: flags as of `memplan estimate`, or names and values.

    What begins with a digit is no name, and belongs to the value before it.

    >>> fields_of("tp=8,recompute=full,sequence_parallel,layers_per_stage=3,5")
    {'tp': 8, 'recompute': 'full', 'sequence_parallel': True, 'layers_per_stage': (3, 5)}
    >>> fields_of("--tp 8 --recompute full --sequence-parallel --layers-per-stage 3,5")
    {'tp': 8, 'recompute': 'full', 'sequence_parallel': True, 'layers_per_stage': (3, 5)}

    Raises:
        UnknownName: a name that is no field of a plan.
        InvalidValue: a field with two values, or flags that are not a plan's.
    """
    if text.lstrip().startswith("--"):
        return plan_of_flags(text)
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
