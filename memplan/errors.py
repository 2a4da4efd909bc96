"""Errors that name the value, the rule that it breaks and a way out."""

from collections.abc import Iterable
from functools import partial
from typing import Any


class MemplanError(ValueError):
    """The error for anything that memplan refuses; its text names value, rule and way out."""


class ContradictoryEstimate(MemplanError):
    """Figures of one plan contradict each other: a fault of memplan's, or of the engine's."""


class InvalidValue(MemplanError):
    """A value of the wrong type or outside its range."""


class UnknownName(MemplanError):
    """A name that is in no table; the text suggests the nearest ones."""


class Refusal(MemplanError):
    """A plan that is refused; `kind`: the reason without this plan's values, to count refusals by."""

    def __init__(self, text: str, *, kind: str = "") -> None:
        super().__init__(text)
        self.kind = kind or text

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), kind=self.kind), self.args


class PlanRefused(Refusal):
    """A plan that cannot run; the text says which rule refuses it and what would be accepted."""


class MissingRule(Refusal):
    """Something that no rule covers; nothing is assumed about it."""


def kind_of(error: MemplanError) -> str:
    """The kind of a refusal; the text of another error."""
    return error.kind if isinstance(error, Refusal) else str(error)


def shown_value(value: object, most: int = 40) -> str:
    """A value's `repr`, cut to `most` characters, for an error's text.

    >>> shown_value("8.5"), len(shown_value("x" * 1000)), shown_value(10**10000)
    ("'8.5'", 40, 'a number of thousands of digits')
    """
    try:
        text = repr(value)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= most else f"{text[: most - 3]}..."


def unknown_name(what: str, name: object, known: Iterable[str]) -> UnknownName:
    """The error for a name that is not in a table, with the names that may have been meant.

    >>> print(unknown_name("model", "lama-2-7b", ["gpt2", "llama-2-7b"]))
    unknown model 'lama-2-7b'; did you mean 'llama-2-7b'? Known: gpt2, llama-2-7b.
    """
    names = sorted(known)
    shown = name[:80] if isinstance(name, str) else shown_value(name)
    return UnknownName(f"unknown {what} {shown!r}{did_you_mean(shown, names)} Known: {', '.join(names)}.")


def did_you_mean(name: str, known: Iterable[str], most: int = 4) -> str:
    """The end of an error's first line: the known names that start with `name`, or the nearest one.

    >>> did_you_mean("h100", ["h100-sxm", "h100-pcie", "h200"])
    "; did you mean 'h100-sxm' or 'h100-pcie'?"
    >>> did_you_mean("h10-sxm", ["h100-sxm", "v100"]), did_you_mean("", ["v100"])
    ("; did you mean 'h100-sxm'?", '.')
    """
    from difflib import get_close_matches  # slow to import, and rarely needed

    names, asked = list(known), name.strip().lower()
    begun = [each for each in names if asked and each.lower().startswith(asked)]
    near = begun[:most] or get_close_matches(asked, names, n=1, cutoff=0.4)
    if not near:
        return "."
    *others, last = map(repr, near)
    return f"; did you mean {', '.join(others)}{' or ' if others else ''}{last}?"


def divisors_text(n: int, limit: int = 12) -> str:
    """The divisors of n as text, the first `limit` of them, for an error's way out.

    >>> divisors_text(12)
    '1, 2, 3, 4, 6, 12'
    """
    divisors = [d for d in range(1, min(n, 65536) + 1) if n % d == 0]
    more = ", ..." if len(divisors) > limit else ""
    return ", ".join(map(str, divisors[:limit])) + more
