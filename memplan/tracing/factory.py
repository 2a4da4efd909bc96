"""A model from the name of a function: `package.module:factory`, as on the command line."""

import os
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any
from unittest.mock import patch

from torch import nn

from memplan.errors import InvalidValue, reason, shown_value
from memplan.models import TracedModel
from memplan.tracing.tracer import trace


def traced_from_factory(name: str, **options: Any) -> TracedModel:
    """What the function of this name returns, traced: the folder one is in is looked into first.

    It returns a module and its example inputs, or a dict of the arguments of `memplan.trace`.

    Raises:
        InvalidValue: there is no such function, or it returns something else.
    """
    module_name, _, attribute = name.partition(":")
    try:
        with patch.object(sys, "path", [os.getcwd(), *sys.path]):
            found: Any = import_module(module_name)
            for part in attribute.split("."):
                found = getattr(found, part)
            made = found()
    except (ImportError, AttributeError) as error:
        raise InvalidValue(
            f"{name} cannot be called ({reason(error)}); name a function as package.module:factory."
        ) from None
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module):
        return trace(*made, **options)
    if isinstance(made, Mapping) and isinstance(made.get("module"), nn.Module) and "example_inputs" in made:
        return trace(**{**options, **made})
    raise InvalidValue(
        f"{name} returns {shown_value(made)}; return (module, example_inputs), or memplan.trace's arguments "
        "as a dict."
    )
