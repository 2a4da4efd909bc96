"""The command line, one file a command; each has `--json`."""

import gc
from typing import Final

try:
    import click
except ModuleNotFoundError:
    raise SystemExit("memplan's commands need click; install it with: pip install 'memplan[cli]'.") from None

from memplan.cli.program import SETTINGS, Commands, command_line

MODULES: Final = {
    "trace": "memplan.cli.trace:command",
    "estimate": "memplan.cli.estimate:command",
    "export": "memplan.cli.export:command",
    "budget": "memplan.cli.budget:command",
    "search": "memplan.cli.search:command",
    "advise": "memplan.cli.advise:command",
    "compare": "memplan.cli.compare:command",
    "models": "memplan.cli.listings:models_command",
    "gpus": "memplan.cli.listings:gpus_command",
}
"""The commands by name, each imported when it is asked for."""


@click.group(cls=Commands, modules=MODULES, context_settings=SETTINGS)
@click.version_option(package_name="memplan")
def commands() -> None:
    """Bytes, traffic and rough time of a distributed training job, before the GPUs are reserved."""


def main() -> None:
    """The entry point of `memplan`.

    Garbage collection is off: a command ends before cycles of objects matter, and it takes a tenth of a
    search.
    """
    gc.disable()
    command_line(commands, "memplan")
