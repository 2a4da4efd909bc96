"""What the commands that search for plans share: how many plans they keep and show, and in which format."""

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import click

from memplan.cli.flags import count_option
from memplan.cli.output import check_format, print_csv, print_json
from memplan.errors import PlanRefused
from memplan.search.search import KEEP, Found
from memplan.search.table import columns_of, search_dict, search_rows
from memplan.search.text import SHOWN, nothing_runs, search_text

F = TypeVar("F", bound=Callable[..., Any])

KEPT: Final = 10
"""Plans that are kept to show the best of them."""

FORMATS: Final = ("show_all", "as_json", "as_csv")
"""The options that are not a search's own."""


def found_options() -> Callable[[F], F]:
    """The flags --keep, --all, --json and --csv."""

    def decorated(command: F) -> F:
        for option in (
            click.option("--csv", "as_csv", is_flag=True, help="The kept plans as CSV instead of text."),
            click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text."),
            click.option(
                "--all",
                "show_all",
                is_flag=True,
                help=f"Show all plans that are kept ({KEEP} unless --keep says otherwise), each with its "
                "command, and the refusals.",
            ),
            count_option(
                "--keep",
                "How many of the plans that fit or may fit to keep and show, else of the nearest; left out: "
                f"{SHOWN} are shown.",
            ),
        ):
            command = option(command)
        return command

    return decorated


def search_keywords(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of a search among a command's values: those that were given, and how many to keep.

    Raises:
        Refused: two formats at once.
    """
    check_format(asked["as_json"], asked["as_csv"])
    keep = KEEP if any(asked[name] for name in FORMATS) else KEPT
    given = {name: value for name, value in asked.items() if value is not None and name not in FORMATS}
    return {"keep": keep} | given


def print_found(result: Found, asked: Mapping[str, Any], model: str | None, answer: str = "") -> None:
    """Prints what a search found; `model`: its name on the command line; `answer`: the text's first line.

    Raises:
        PlanRefused: no plan can run.
    """
    from memplan.search.replays import replay_ahead  # multiprocessing is slow to import

    replay_ahead(result)
    if asked["as_csv"]:
        print_csv(search_rows(result, model), columns_of(result))
    elif asked["as_json"]:
        print_json(search_dict(result, model))
    reason = nothing_runs(result)
    if reason:
        raise PlanRefused(reason)
    if not asked["as_csv"] and not asked["as_json"]:
        most = None if asked["show_all"] or asked["keep"] is not None else SHOWN
        text = search_text(result, model, most=most, in_full=asked["show_all"])
        click.echo("\n\n".join(filter(None, (answer, text))))
        if result.fitting is None and result.best is None and result.cluster.budget_bytes is not None:
            from memplan.search.alternatives import (
                alternatives_text,
            )  # what it searches takes a second or two

            click.echo(f"\n{alternatives_text(result.model, result.cluster, result.jobs[0], model)}")
