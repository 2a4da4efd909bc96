"""A MODEL that is named as `package.module:factory`."""

import re
from typing import Any

from memplan.errors import installed


def model_of(name: str) -> Any:
    """What the function `package.module:factory` returns, for memplan to trace; every other name unchanged.

    Only functions whose name somebody types are called: no file names one.
    """
    if re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", name) is None:
        return name
    with installed("a module that is traced", "trace"):
        from memplan.tracing.factory import made_by  # imports torch, which the module needs too
    return made_by(name)
