"""The `memplan estimate` command line of a plan."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

from memplan.engines.options import not_usual
from memplan.errors import MemplanError
from memplan.estimate import Estimate
from memplan.hardware import Cluster, cluster, gpus_per_node
from memplan.models import Model, implemented, preset, preset_named, preset_names
from memplan.models.families import implementations_of
from memplan.models.recording import MIXTURE
from memplan.models.traced import is_of_torchtitan
from memplan.plan import Plan
from memplan.text_tables import WIDTH

FIRST: Final = ("dp_replicate", "dp", "cp", "tp", "pp", "zero")
"""Fields of a plan that stand first, in this order."""

ALWAYS: Final = ("global_batch", "seq_len")
"""Fields that are always written, as the command's defaults for them depend on the model."""


def estimate_command(estimated: Estimate, model: str | None = None) -> str | None:
    """The `memplan estimate` line of a plan; None for a model or a cluster that no command line can name.

    `model`: how the model was named on the command line; None: by its preset.

    >>> from memplan import estimate
    >>> print(estimate_command(estimate("gpt2", cluster="8xh100-sxm", zero=3, margin=0.1)))
    memplan estimate gpt2 --cluster 8xh100-sxm --margin 0.1 --zero 3 --global-batch 8 --seq-len 1024
    """
    name = _preset_name(estimated.model) if model is None else model
    values = plan_values(estimated.plan)
    if estimated.cluster is not None:
        where = cluster_values(estimated.cluster)
        values.pop("dp", None)  # what the cluster has left
    else:
        where = {"device": "cpu"} if estimated.device.on_cpu else {}
    if name is None or where is None:
        return None
    name = f"./{name}" if name.startswith("-") else name
    said = _implementation(estimated.model, named_as=name)
    return shlex.join(["memplan", "estimate", name, *_flags(said | where | values)])


def export_command(estimated: Estimate, to: str, model: str | None = None) -> str | None:
    """The `memplan export` line of a plan; None for a model or a cluster that no command line can name.

    `to`: a launcher, as "torchrun"; `memplan.launchers.targets` says which can be told the plan.

    >>> from memplan import estimate
    >>> print(export_command(estimate("gpt2", cluster="8xh100-sxm"), "torchrun"))
    memplan export gpt2 --cluster 8xh100-sxm --global-batch 8 --seq-len 1024 --to torchrun
    """
    command = estimate_command(estimated, model)
    return None if command is None else f"{command.replace('estimate', 'export', 1)} --to {to}"


def _preset_name(model: Model) -> str | None:
    if model.name not in preset_names():
        return None
    usual = preset(model.name)
    if model == usual:
        return model.name
    has_code = model.implementation in implementations_of(usual)
    return model.name if has_code and implemented(usual, model.implementation) == model else None


def _implementation(model: Model, named_as: str) -> dict[str, str]:
    """The implementation, unless it is the model's default."""
    if is_of_torchtitan(model):
        return {"implementation": MIXTURE}
    known = preset_named(named_as) is not None
    usual = preset(named_as).implementation if known else "traced" if ":" in named_as else None
    return {} if model.implementation == usual else {"implementation": model.implementation}


def cluster_values(where: Cluster) -> dict[str, Any] | None:
    """The keywords that make a cluster, with what differs from the tables; None if none can."""
    said: dict[str, Any] = {}
    try:
        if where.gpus_per_node != min(where.n_gpus, gpus_per_node(where.gpu.name)):
            said["gpus_per_node"] = where.gpus_per_node
        usual = cluster(where.name, **said)
        if where.inter_node.bytes_per_s != usual.inter_node.bytes_per_s:
            said["network"] = (
                f"{(where.inter_node.bytes_per_s or 0) / 1e9:.9f}".rstrip("0").rstrip(".") + "GB/s"
            )
        said |= {
            name: getattr(where, name)
            for name in ("margin", "efficiency")
            if getattr(where, name) != getattr(usual, name)
        }
        named = cluster(where.name, **said)
    except MemplanError:
        return None
    return {"cluster": where.name} | said if _facts(named) == _facts(where) else None


def _facts(where: Cluster) -> tuple[Any, ...]:
    """The values of a cluster that an estimate depends on."""
    links = (where.intra_node, where.inter_node.bytes_per_s)
    return where.gpu, where.gpus_per_node, links, where.margin, where.efficiency


def plan_values(plan: Plan) -> dict[str, Any]:
    """The fields of a plan that are not at their defaults."""
    said = {name: getattr(plan, name) for name in ALWAYS} | not_usual(plan)
    order = [*FIRST, *said]
    return {name: said[name] for name in dict.fromkeys(order) if name in said}


def _flags(values: Mapping[str, Any]) -> Iterator[str]:
    for name, value in values.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        else:
            yield f"--{flag}"
            yield ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def command_text(command: str, *, head: str = "") -> str:
    r"""A command in lines that a shell takes as one, after a head.

    >>> command = "memplan estimate gpt2 --cluster 8xh100-sxm --zero 3 --global-batch 8 --seq-len 1024"
    >>> print(command_text(command, head="1  "))
    1  memplan estimate gpt2 --cluster 8xh100-sxm --zero 3 --global-batch 8 \
           --seq-len 1024
    """
    first, *others = _units(shlex.split(command))
    lines = [head + first]
    for unit in others:
        if len(lines[-1]) + len(unit) + len(" ") + len(" \\") > WIDTH:
            lines[-1] += " \\"
            lines.append(" " * (len(head) + 4) + unit)
        else:
            lines[-1] += f" {unit}"
    return "\n".join(lines)


def _units(words: Sequence[str]) -> Iterator[str]:
    """A command's words that stay on one line: its name and model, then each flag with its value."""
    starts = [0, *(i for i, word in enumerate(words) if word.startswith("--")), len(words)]
    return (shlex.join(words[start:stop]) for start, stop in pairwise(starts))
