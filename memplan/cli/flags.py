"""The flags of a plan, a cluster and a search, made of the tables of their fields."""

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import click

from memplan.cli.program import Refused
from memplan.command import command_text
from memplan.engines.base import ENGINES
from memplan.engines.options import USUAL_ENGINE, engine_of_option
from memplan.errors import InvalidValue, shown_value
from memplan.fields import (
    Choice,
    Count,
    Counts,
    Field,
    Flag,
    Name,
    Names,
    Number,
    Registered,
    Setting,
    count_or_text,
    described_fields,
    number_or_text,
)
from memplan.hardware import CLUSTER_FIELDS
from memplan.models.families import IMPLEMENTATION
from memplan.plan import FIELDS, Plan, ranks_along
from memplan.plan import GROUPS as PLAN_GROUPS
from memplan.unmodelled import KEYWORDS, not_modelled

F = TypeVar("F", bound=Callable[..., Any])


def count_option(flag: str, text: str, *, required: bool = False) -> Callable[[F], F]:
    """A flag that takes a count."""
    return click.option(flag, type=count_or_text, required=required, help=text, metavar="N")


def choice_option(flag: str, choices: tuple[str, ...], default: str | None, text: str) -> Callable[[F], F]:
    """A flag that takes one of several words."""
    shown = default is not None
    return click.option(flag, default=default, metavar="|".join(choices), help=text, show_default=shown)


def cluster_options(
    *, named: bool = True, required: bool = True, text: str = "As in 64xh100-sxm."
) -> Callable[[F], F]:
    """The cluster's flags: its name, unless it is what is asked for, and what differs from its table."""
    return _all_of(
        [
            *([click.option("--cluster", required=required, metavar="NxGPU", help=text)] if named else []),
            *(_plan_option(name, field, None) for name, field in CLUSTER_FIELDS.items()),
        ]
    )


def blocks_option() -> Callable[[F], F]:
    """The flag that names the lists of blocks of one's own module."""
    text = "Lists of blocks of your own module, as model.layers; left out: what looks like blocks."
    return click.option("--blocks", metavar="PATH,...", help=text)


def model_options() -> Callable[[F], F]:
    """The flags that say where a model comes from: whose code trains it, and whether traces are kept."""
    return _all_of(
        [
            _plan_option("implementation", IMPLEMENTATION, None),
            click.option(
                "--no-cache",
                "cache",
                flag_value=False,
                default=True,
                help="Trace a config.json anew: the traces kept in the user's cache folder are not read, and "
                "the new one is not written there.",
            ),
        ]
    )


def plan_options(*left_out: str, **defaults: Any) -> Callable[[F], F]:
    """The flags of the fields of a Plan, for a command; `defaults` where they differ from the plan's."""
    told = {name: _default(name) for name in FIELDS} | defaults
    chosen = [name for name in FIELDS if name not in left_out]
    return _all_of([_plan_option(name, FIELDS[name], told[name]) for name in chosen])


METAVARS: Final[dict[type[Field], str]] = {
    Count: "N",
    Counts: "N,N,...",
    Number: "X",
    Name: "NAME",
    Names: "NAME,NAME,...",
    Setting: "NAME:VALUE,...",
}
"""The placeholder for a field's value in the help of its flag."""

GROUPS: Final[dict[str, tuple[str, ...]]] = {
    "Model and cluster": (
        *("torchtitan", "accelerate", "transformers", "deepspeed", "megatron", "blocks", "implementation"),
        "cache",
        "cluster",
        "most_gpus",
        "gpus_per_node",
        "network",
        "margin",
        "efficiency",
        "device",
    ),
    **PLAN_GROUPS,
    "Search": ("objective", "tp_across_nodes"),
    "Training": ("tokens", "price_per_gpu_hour"),
    "Other options": (),
    "Output": ("keep", "show_all", "details", "ledger", "as_json", "as_csv", "help"),
}
"""The options of a command's help by group, in order; an option in no group is one of the others."""

FLAG_WIDTH: Final = 24
"""The widest column of flags in a command's help; a longer flag has a line of its own."""


LONGEST_CHOICES: Final = 78
"""Columns for a flag and the words that it takes; more words are listed in its help."""


def _plan_option(name: str, field: Field, default: Any) -> Callable[[F], F]:
    """The flag of a field that takes one value."""
    flag, told = _flag(name), {"default": default, "help": field.help, "show_default": default is not None}
    match field:
        case Flag() if default:
            return click.option(f"{flag}/--no{flag[1:]}", **told)
        case Flag(optional=True):
            return click.option(f"{flag}/--no{flag[1:]}", default=None, help=field.help)
        case Flag():
            return click.option(flag, is_flag=True, help=field.help)
        case Choice() | Registered():
            if len(flag) + len(metavar := "|".join(field.choices)) < LONGEST_CHOICES:
                return click.option(flag, metavar=metavar, **told)
            listed = f"{field.help.rstrip('.')}: {', '.join(field.choices)}."
            return click.option(flag, metavar="NAME", **told | {"help": listed})
    return click.option(flag, type=field.parsed, metavar=METAVARS[type(field)], **told)


def search_options() -> Callable[[F], F]:
    """The flags of a search for a plan's fields."""
    searched = [name for name in FIELDS if name not in ("global_batch", "seq_len")]
    return _all_of([search_option(name, FIELDS[name], _default(name)) for name in searched])


def search_option(name: str, field: Field, default: Any) -> Callable[[F], F]:
    """The flag of a search for a field, which takes values and ranges between commas: 1-4,8."""
    flag, text = _flag(name), field.text
    if isinstance(field, Choice | Registered):
        text += f": {', '.join(field.choices)}"
    if not field.varied:
        text += f"; left out: {field.left_out or default}"
    match field:
        case Setting() | Names():
            return click.option(flag, metavar=METAVARS[type(field)], help=f"{text}.")
        case Flag():
            return click.option(f"{flag}/--no{flag[1:]}", default=None, help=f"{text}.")
        case Choice() | Registered() | Name():
            return click.option(flag, type=_several(str), metavar="NAME,...", help=f"{text}.")
        case Count():
            return click.option(flag, type=_ranges, metavar="N,N-N,...", help=f"{text}.")
        case Number():
            return click.option(flag, type=_several(number_or_text), metavar="X,X,...", help=f"{text}.")
    return _plan_option(name, field, default)


def _default(name: str) -> Any:
    return Plan.__dataclass_fields__[name].default


class PlanCommand(click.Command):
    """A command with flags for a plan's fields and for the options of the engine named by `--engine`.

    `defaults`: options whose default here differs from the engine's. `option`: makes an option's flag.
    `examples`: commands that its help ends with.
    """

    def __init__(
        self,
        *args: Any,
        defaults: Mapping[str, Any] | None = None,
        option: Callable[[str, Field, Any], Callable[[Any], Any]] = _plan_option,
        examples: Sequence[str] = (),
        **attributes: Any,
    ) -> None:
        super().__init__(*args, **attributes)
        self.defaults, self.option, self.examples = defaults or {}, option, examples

    def options_of(self, engine: str) -> list[click.Parameter]:
        """The flags of other packages' axes that an engine knows, and of its own options.

        `engine`: also several between commas. None for an unknown engine, which is refused later.
        """
        flags = click.Command(None)
        known: dict[str | None, click.Parameter] = {}
        for each in [ENGINES.named(name) for name in engine.split(",") if name in ENGINES.names()]:
            for axis in each.other_axes:
                self.option(axis, ranks_along(axis), 1)(flags)
            kind: Any = each.options
            for name, field in (described_fields(kind) if kind else {}).items():
                default = self.defaults.get(name, kind.__dataclass_fields__[name].default)
                self.option(name, field, default)(flags)
            for flag in flags.params:
                known.setdefault(flag.name, flag)
        return list(known.values())

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        said = re.findall(r"(?:^| )--engine[= ](\S+)", " ".join(args))
        ctx.meta["engine"] = engine = [USUAL_ENGINE, *said][-1]
        ctx.meta["options"] = self.options_of(engine)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if (sentence := not_modelled(KEYWORDS, error.option_name)) is not None:
                raise Refused(sentence) from None
            owner = engine_of_option(error.option_name.strip("-").removeprefix("no-").replace("-", "_"))
            if owner is None:
                raise
            whose = f"{error.option_name} is an option of engine {owner}, not of {engine}"
            raise Refused(f"{whose}; leave it out, or use --engine {owner}.") from None

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*super().get_params(ctx), *ctx.meta.get("options", ())]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the options in groups, the engine's own options after the engine."""
        options = {_name(each): each for each in self.get_params(ctx) if isinstance(each, click.Option)}
        groups = {**GROUPS, "Engine": (*GROUPS["Engine"], *map(_name, ctx.meta["options"]))}
        grouped = {name for names in groups.values() for name in names}
        groups["Other options"] = tuple([name for name in options if name not in grouped])
        for group, names in groups.items():
            rows = [options[name].get_help_record(ctx) for name in names if name in options]
            if shown := [row for row in rows if row is not None]:
                with formatter.section(f"Engine {ctx.meta['engine']}" if group == "Engine" else group):
                    formatter.write_dl(shown, col_max=FLAG_WIDTH)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the examples, each as a command that can be copied."""
        if self.examples:
            with formatter.section("Examples"):
                for example in self.examples:
                    formatter.write(command_text(example, head="  ") + "\n")


def plan_of_flags(text: str) -> dict[str, Any]:
    """The fields of a plan that are written as flags, as the commands print them.

    Raises:
        InvalidValue: an unknown flag, or a value that is missing.
    """
    command = plan_options()(PlanCommand("plan", add_help_option=False))
    try:
        context = command.make_context("plan", shlex.split(text))
    except (click.UsageError, ValueError) as error:
        said = error.format_message() if isinstance(error, click.UsageError) else f"{error}."
        raise InvalidValue(
            f"plan {shown_value(text.strip())}: {said} Give a plan's own flags, as '--tp 8 --zero 3'."
        ) from None
    given = click.core.ParameterSource.COMMANDLINE
    return {
        name: value for name, value in context.params.items() if context.get_parameter_source(name) is given
    }


def is_plan_flag(word: str) -> bool:
    """Whether a word is a flag of a plan, with or without its value.

    >>> is_plan_flag("--tp"), is_plan_flag("--no-set-to-none"), is_plan_flag("--cluster=8xh100-sxm")
    (True, True, False)
    """
    name = word.partition("=")[0].removeprefix("--").replace("-", "_")
    known = (name, name.removeprefix("no_"))
    return word.startswith("--") and any(each in FIELDS or engine_of_option(each) for each in known)


def _name(option: click.Parameter) -> str:
    """An option's name in `GROUPS`; click's own name for --help differs between its releases."""
    return "help" if "--help" in option.opts else str(option.name)


def _all_of(options: Sequence[Callable[[Any], Any]]) -> Callable[[F], F]:
    def decorated(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return decorated


def _several(parsed: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """Parses values between commas."""
    return lambda text: tuple(map(parsed, text.split(",")))


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _ranges(text: str) -> tuple[int | str, ...]:
    """Counts and ranges of counts; the text of what is neither, to be refused.

    >>> _ranges("1-4,8"), _ranges("1,8-4,8-x")
    ((1, 2, 3, 4, 8), (1, '8-4', '8-x'))
    """
    found: list[int | str] = []
    for part in text.split(","):
        ends = re.fullmatch(r"([0-9]{1,7})-([0-9]{1,7})", part)
        counts = range(0) if ends is None else range(int(ends[1]), int(ends[2]) + 1)
        found += counts or [count_or_text(part)]
    return tuple(found)


COUNTS: Final = _several(count_or_text)
