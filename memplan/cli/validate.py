"""`memplan validate`: the commands of `python -m validate`, which need torch."""

import gc
from importlib import import_module
from typing import Final

import click

from memplan.cli.program import Refused, one_line

MISSING: Final = "memplan validate needs PyTorch and more; install it with: pip install 'memplan[validate]'"


@click.command(
    "validate",
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def command(args: tuple[str, ...]) -> None:
    """Run plans for real and compare them with memplan's predictions; needs torch.

    The commands are those of `python -m validate`, whose docstring says what its name may collide with.
    """
    gc.enable()  # which main() has disabled: runs take longer than a search
    try:
        group = import_module("validate.__main__").main
    except ModuleNotFoundError as missing:
        if str(missing.name).partition(".")[0] == "validate":
            raise Refused(
                f"another module named validate comes before memplan's ({one_line(str(missing))}); run this "
                "in another folder, or in an environment without it."
            ) from None
        raise Refused(f"{MISSING} ({one_line(str(missing))}).") from None
    group.main([*args] or ["-h"], prog_name="memplan validate", standalone_mode=False)
