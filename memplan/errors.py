"""Errors that name the value, the rule it breaks and a way out."""

from collections.abc import Iterable
from difflib import get_close_matches


class MemplanError(ValueError):
    """Anything memplan refuses; its text names value, rule and way out."""


class InvalidValue(MemplanError):
    """A value of the wrong type or outside its range."""


class UnknownName(MemplanError):
    """A name that is in no table; the text offers the nearest ones."""


class PlanRefused(MemplanError):
    """A plan that cannot run: the text says which rule refuses it and what would be accepted."""


class MissingRule(MemplanError):
    """No rule states what this operation costs; nothing is assumed in its place."""


def shown_value(value: object, most: int = 40) -> str:
    """A value's representation, cut to `most` characters, for an error's text.

    >>> shown_value("8.5"), len(shown_value("x" * 1000)), shown_value(10**10000)
    ("'8.5'", 40, 'a number of thousands of digits')
    """
    try:
        text = repr(value)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= most else f"{text[: most - 3]}..."


def unknown_name(what: str, name: object, known: Iterable[str]) -> UnknownName:
    """The error for a name that is not in a table, with the nearest match.

    >>> print(unknown_name("model", "lama-2-7b", ["gpt2", "llama-2-7b"]))
    unknown model 'lama-2-7b'; did you mean 'llama-2-7b'? Known: gpt2, llama-2-7b.
    """
    names = sorted(known)
    shown = name[:80] if isinstance(name, str) else shown_value(name)
    near = get_close_matches(shown.lower(), names, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return UnknownName(f"unknown {what} {shown!r}{hint} Known: {', '.join(names)}.")


def divisors_text(n: int, limit: int = 12) -> str:
    """The divisors of n as text, for a way out.

    >>> divisors_text(12)
    '1, 2, 3, 4, 6, 12'
    """
    divisors = [d for d in range(1, min(n, 65536) + 1) if n % d == 0]
    more = ", ..." if len(divisors) > limit else ""
    return ", ".join(map(str, divisors[:limit])) + more
