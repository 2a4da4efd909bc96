"""A MODEL that is named as `package.module:factory`."""

import re
from typing import Any

from memplan.cli.program import Refused, one_line
from memplan.estimate import device_of
from memplan.hardware import resolve_cluster
from memplan.models import Model


def module_traced(name: str, device: Any, cluster: Any = None, **options: Any) -> str | Model:
    """The model of `package.module:factory`, traced for the device or the cluster's; other text unchanged."""
    options = {key: value for key, value in options.items() if value is not None}
    if re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", name) is None:
        if "blocks" in options:
            raise Refused(
                f"--blocks names lists of your own module, which {one_line(name)} is not; give "
                "package.module:factory, or leave it out."
            )
        return name
    try:
        from memplan.tracing.factory import traced_from_factory  # imports torch, which the module needs too
    except ModuleNotFoundError as missing:
        raise Refused(f"{one_line(str(missing))}; to trace a module: pip install 'memplan[trace]'.") from None
    device = device or device_of(resolve_cluster(cluster)).type
    return traced_from_factory(name, device=device, **options)
