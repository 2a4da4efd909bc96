"""A MODEL that is named as `package.module:factory`."""

import re
from typing import Any

from memplan.cli.program import Refused, one_line
from memplan.errors import installed


def model_of(name: str, blocks: str | None = None) -> Any:
    """What the function `package.module:factory` returns, for memplan to trace; every other name unchanged.

    `package/module.py:factory` is the same function. Only functions whose name somebody types are called: no
    file names one. `blocks`: the lists of its blocks.

    Raises:
        Refused: blocks of a model that is no module.
    """
    file, colon, function = name.partition(":")
    if file.endswith(".py"):
        name = f"{file.removesuffix('.py').removeprefix('./').replace('/', '.')}{colon}{function}"
    if re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", name) is None:
        if blocks is not None:
            raise Refused(
                f"--blocks names lists of your own module, which {one_line(name)} is not; give "
                "package.module:factory, or leave it out."
            )
        return name
    with installed("a module that is traced", "trace"):
        from memplan.tracing.factory import arguments_of, made_by  # imports torch, which the module needs too
    made = made_by(name)
    return made if blocks is None else {**arguments_of(made, name), "blocks": blocks}
