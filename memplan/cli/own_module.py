"""A MODEL that is named as `package.module:factory`."""

import re
from typing import Any

from memplan.errors import installed
from memplan.estimate import device_of
from memplan.hardware import resolve_cluster
from memplan.models import Model


def module_traced(name: str, device: Any, cluster: Any = None, **options: Any) -> str | Model:
    """The model of `package.module:factory`, traced for the device or the cluster's; other text unchanged."""
    if re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", name) is None:
        return name
    with installed("a module that is traced", "trace"):
        from memplan.tracing.factory import traced_from_factory  # imports torch, which the module needs too
    device = device or device_of(resolve_cluster(cluster)).type
    return traced_from_factory(name, device=device, **options)
