"""Configuration files and arguments of launchers as plans: `memplan estimate --torchtitan FILE`.

--megatron takes Megatron's arguments in quotes; --transformers takes a file of TrainingArguments, or its
flags in quotes.
"""

from collections.abc import Callable
from math import prod
from typing import Any, Final

import click
from click.core import ParameterSource

from memplan.cli.program import Refused
from memplan.engines.options import option_fields
from memplan.hardware import resolve_cluster
from memplan.launchers import read
from memplan.models import Model, resolve

LAUNCHERS: Final = ("torchtitan", "accelerate", "transformers", "deepspeed", "megatron")
"""The launchers whose files are read."""


def file_options() -> Callable[[Any], Any]:
    """The flags that name a launcher's file."""

    def decorated(command: Any) -> Any:
        for name in reversed(LAUNCHERS):
            text = f"The plan of a file of {name}; flags beside it win."
            command = click.option(f"--{name}", metavar="FILE", help=text)(command)
        return command

    return decorated


def with_file(model: str | None, asked: dict[str, Any]) -> tuple[str | Model, dict[str, Any]]:
    """The model, or its name, and the flags with what a launcher's file says where no flag was given.

    Raises:
        UsageError: without a model.
        Refused: with several files, or a file beside a function of the user's.
        MemplanError: a file that cannot be read as a plan.
    """
    context = click.get_current_context()
    files = {name: file for name in LAUNCHERS if (file := asked.pop(name)) is not None}
    if len(files) > 1:
        raise Refused(f"{' and '.join(f'--{name}' for name in files)} are two plans; use one of them.")
    for name, file in files.items():
        if model is not None and ":" in model:
            raise Refused(f"--{name} plans models of a name or a file; plan a function of yours by flags.")
        found = read(file, name, None if model is None else resolve(model, asked["implementation"]))
        for note in found.notes:
            click.echo(f"Note: {note}", err=True)
        given = {key for key in asked if context.get_parameter_source(key) is ParameterSource.COMMANDLINE}
        degrees = {key: value for key, value in found.keywords.items() if key not in given}
        said = found.on_ranks(_n_replicas({**asked, **degrees}), asked.get("micro_batch") or 1)
        if said.get("engine", asked["engine"]) != asked["engine"] and "engine" not in given:
            others = set(option_fields(asked["engine"])) - given  # the defaults of another engine
            asked = {key: value for key, value in asked.items() if key not in others}
        asked |= {key: value for key, value in said.items() if key not in {*given, "model"}}
        if model is None and "model" in said:
            return said["model"], asked
    if model is None:
        raise click.UsageError("Missing argument 'MODEL'.", context)
    return model, asked


def _n_replicas(asked: dict[str, Any]) -> int:
    """The replicas that flags and a file ask for: `--dp`, or what the cluster has left."""
    if asked.get("dp") is not None:
        return int(asked["dp"])
    where = resolve_cluster(asked.get("cluster"))
    n_others = prod(asked.get(axis) or 1 for axis in ("cp", "tp"))
    return 1 if where is None else max(1, where.n_gpus // n_others)
