"""The command line, one file a command; each has `--json`."""

import gc
import sys
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
    "smallest-cluster": "memplan.cli.questions:smallest_cluster_command",
    "longest-sequence": "memplan.cli.questions:longest_sequence_command",
    "largest-model": "memplan.cli.questions:largest_model_command",
    "advise": "memplan.cli.advise:command",
    "compare": "memplan.cli.compare:command",
    "explain-oom": "memplan.cli.explain_oom:command",
    "models": "memplan.cli.listings:models_command",
    "gpus": "memplan.cli.listings:gpus_command",
    "validate": "memplan.cli.validate:command",
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
    if sys.stderr is not None and sys.stderr.isatty():
        from memplan.cli.tracing_line import show_tracing  # slow to import, and not needed in a pipe

        show_tracing()
    command_line(commands, "memplan")
