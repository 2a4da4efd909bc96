"""Commands as a program: errors as one line on stderr, unknown names, an output that cannot be written."""

import errno
import os
import signal
import sys
from collections.abc import Mapping
from importlib import import_module
from types import FrameType
from typing import Any, Final, NoReturn

import click

from memplan.errors import MemplanError, did_you_mean
from memplan.files import shown_path
from memplan.names import option_of
from memplan.text_tables import printable

SETTINGS: Final = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
"""Settings of every command, also of `validate`."""


INTERRUPTED: Final = 128 + signal.SIGINT
"""The exit code of a command that Ctrl-C ended."""


WHOLE: Final = 1000
"""Characters of a command's first sentence: click would cut it off after 45."""


NO_COMMAND: Final = getattr(click.exceptions, "NoArgsIsHelpError", ())
"""What click raises, from 8.2 on, to print the help of a group without a command."""


class Refused(click.ClickException):
    """An error of memplan's as one message on stderr, with exit code 2."""

    exit_code = 2


class Commands(click.Group):
    """Commands that print errors as one line on stderr, and suggest a name for an unknown command.

    `modules`: commands by name, as "package.module:function", each imported when it is asked for.
    """

    def __init__(self, *args: Any, modules: Mapping[str, str] | None = None, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.modules = modules or {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *self.modules})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self.modules and cmd_name not in self.commands:
            module, _, function = self.modules[cmd_name].partition(":")
            self.add_command(getattr(import_module(module), function), cmd_name)
        return super().get_command(ctx, cmd_name)

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        if os.environ.get("NO_COLOR"):  # https://no-color.org; commands inherit it
            kwargs["color"] = False
        try:
            return super().make_context(*args, **kwargs)
        except click.UsageError as error:
            if isinstance(error, NO_COMMAND):
                raise
            raise _refused(error) from None

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except MemplanError as refusal:
            raise Refused(one_line(str(refusal))) from None
        except click.UsageError as error:
            raise _refused(error) from None
        except OSError as error:
            if error.errno == errno.EPIPE or not error.strerror:
                raise
            where = "" if error.filename is None else f"{shown_path(error.filename)}: "
            raise Refused(f"{where}{error.strerror}.") from None

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if self.get_command(ctx, args[0]) is None:
            name, known = args[0], self.list_commands(ctx)
            near = did_you_mean(name, known)
            raise Refused(f"unknown command {name[:80]!r}{near} Commands: {', '.join(known)}.")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        known = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        rows = [(name, each.get_short_help_str(limit=WHOLE)) for name, each in known if each is not None]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def _refused(error: click.UsageError) -> Refused:
    """click's message for a wrong flag or argument, and the command that prints help, in one line."""
    where = "" if error.ctx is None else f" Try '{error.ctx.command_path} -h' for help."
    said = _no_such_flag(error) if isinstance(error, click.NoSuchOption) else error.format_message()
    return Refused(one_line(f"{said}{where}"))


def _no_such_flag(error: click.NoSuchOption) -> str:
    """What is wrong with a flag, and the flag that another framework's name or a slip of the keys means."""
    name = error.option_name
    params = [] if error.ctx is None else error.ctx.command.get_params(error.ctx)
    own = [flag for each in params for flag in each.opts if flag.startswith("--")]
    given = [each for each in params if isinstance(each, click.Argument) and name == f"--{each.name}"]
    if given:
        return f"{given[0].human_readable_name} is given without {name}."
    keyword, _, value = (option_of(name) or "").partition("=")
    if (flag := f"--{keyword.replace('_', '-')}") in own:
        bare = value.strip("'")
        return f"{name} is called {flag}{' ' * bool(bare)}{bare} in memplan."
    return f"no such flag {name}{did_you_mean(name, own)}"


def one_line(text: str) -> str:
    """A message without line breaks, and without what could move a terminal's cursor.

    >>> one_line("tp=3 is refused;  use 1")
    'tp=3 is refused; use 1'
    """
    return printable(" ".join(text.split()))


def command_line(group: click.Group, name: str) -> NoReturn:
    """Runs commands as a program and ends it.

    Whatever the terminal cannot show is written as an escape; an output that cannot be written is one line on
    stderr and exit code 2; one that nobody reads any more ends the program without a word. Ctrl-C ends it
    with 130, as a shell says of a program that SIGINT ended.
    """
    if sys.stdout is None:
        print("Error: the output cannot be written (it is closed).", file=sys.stderr)
        sys.exit(2)
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")
    interrupts: list[int] = []

    def interrupted(number: int, frame: FrameType | None) -> None:
        interrupts.append(number)
        signal.default_int_handler(number, frame)

    try:
        try:
            if signal.getsignal(signal.SIGINT) in (signal.SIG_DFL, signal.default_int_handler):
                signal.signal(signal.SIGINT, interrupted)
            group(prog_name=name)
            code: Any = 0
        except SystemExit as end:
            code = INTERRUPTED if interrupts else end.code
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except OSError as error:
        # What is left in the buffer has nowhere to go: Python would complain of it when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno != errno.EPIPE:
            print(f"Error: the output cannot be written ({error.strerror}).", file=sys.stderr)
        code = 1 if error.errno == errno.EPIPE else 2
    sys.exit(code)
