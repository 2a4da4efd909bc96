"""The version of memplan, and of the form of its JSON."""

from functools import cache
from typing import Any, Final

SCHEMA_VERSION: Final = 1
"""Incremented whenever a key of `to_dict()` or `--json` is removed or changes its meaning."""


@cache
def version() -> str:
    """memplan's version, also of a checkout that is not installed."""
    import tomllib  # which, like the others, is slow to import and rarely needed
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed_version
    from pathlib import Path

    try:
        return installed_version("memplan")
    except PackageNotFoundError:
        project = Path(__file__).parents[1] / "pyproject.toml"
        return str(tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"])


def versioned(values: dict[str, Any]) -> dict[str, Any]:
    """Plain values preceded by both versions.

    >>> list(versioned({"peak_bytes": 1}))
    ['memplan_version', 'schema_version', 'peak_bytes']
    """
    return {"memplan_version": version(), "schema_version": SCHEMA_VERSION, **values}
