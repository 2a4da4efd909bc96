"""Descriptions of a plan's fields: their values, their texts for people, their words in names of cases.

`memplan.plan.Plan` describes each of its fields once, with one of these values. The checks of a plan, the
flags of the command line, the columns of a search and the names of cases are read from there.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, final

from memplan.checks import LARGEST, checked_choice, checked_count, checked_flag, checked_positive
from memplan.errors import InvalidValue, shown_value
from memplan.registry import Registry

FLAG_WORDS = {"": True, "true": True, "yes": True, "false": False, "no": False}
"""The words for a flag's values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field(ABC):
    """A field of a plan.

    Attributes:
        text: what the field means, for people.
        left_out: the value if the field is left out, in words; empty: its default is shown.
        optional: whether None is a value, which means `left_out`.
        varied: whether a search tries all its values.
        word: the field in the name of a case, if it is not the default; empty: the name needs more than its
            value.
    """

    text: str = field(kw_only=False)
    left_out: str = ""
    optional: bool = False
    varied: bool = False
    word: str = ""

    @property
    def help(self) -> str:
        """The text, and the value if the field is left out."""
        return f"{self.text}; left out: {self.left_out}." if self.left_out else f"{self.text}."

    def checked(self, name: str, value: object) -> Any:
        """The value as a plan keeps it.

        Raises:
            InvalidValue, UnknownName: a value of the wrong type, out of range or in no table.
        """
        return None if value is None and self.optional else self._checked(name, value)

    @abstractmethod
    def _checked(self, name: str, value: object) -> Any:
        """`checked` of a value that is not left out."""

    def parsed(self, text: str) -> Any:
        """The value that a text means; the text itself if it means none, to be refused by `checked`."""
        return text


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Count(Field):
    """A whole number within [least, most]."""

    least: int = 1
    most: int = LARGEST

    def _checked(self, name: str, value: object) -> int:
        return checked_count(name, value, least=self.least, most=self.most)

    def parsed(self, text: str) -> int | str:
        return count_or_text(text)


@final
class Counts(Field):
    """Several whole numbers, each at least 0."""

    def _checked(self, name: str, value: object) -> tuple[int, ...]:
        if not isinstance(value, Sequence) or isinstance(value, str) or not value:
            raise InvalidValue(
                f"{name}={shown_value(value)} is not allowed; use several whole numbers, as (3, 5), in a "
                "command 3,5 or 3+5."
            )
        return tuple(checked_count(name, n, least=0) for n in value)

    def parsed(self, text: str) -> tuple[int | str, ...] | str:
        numbers = tuple(map(count_or_text, re.split(r"\s*[+,]\s*", text)))
        return text if any(isinstance(n, str) for n in numbers) else numbers


@final
class Number(Field):
    """A finite number above 0."""

    def _checked(self, name: str, value: object) -> float:
        return checked_positive(name, value)

    def parsed(self, text: str) -> float | str:
        return number_or_text(text)


@final
class Flag(Field):
    """True or False."""

    def _checked(self, name: str, value: object) -> bool:
        return checked_flag(name, value)

    def parsed(self, text: str) -> bool | str:
        return FLAG_WORDS.get(text.lower(), text)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Choice(Field):
    """One of some names."""

    choices: tuple[str, ...]

    def _checked(self, name: str, value: object) -> str:
        return checked_choice(name, value, self.choices)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Registered(Field):
    """A name in a registry."""

    registry: Registry[Any]

    @property
    def choices(self) -> tuple[str, ...]:
        """All names, other packages' included."""
        return self.registry.names()

    def _checked(self, name: str, value: object) -> str:
        return self.registry.checked_name(value)


@final
class Name(Field):
    """A name that is looked up later; a value that is no text becomes its `repr`, which no table has."""

    def _checked(self, name: str, value: object) -> str:
        return value if isinstance(value, str) else shown_value(value)


@final
class Names(Field):
    """Several names, each once, as a text with commas between them; a sequence of names becomes that."""

    def _checked(self, name: str, value: object) -> str:
        parts = value.split(",") if isinstance(value, str) else value
        if not isinstance(parts, Sequence) or not all(isinstance(part, str) for part in parts):
            raise InvalidValue(
                f"{name}={shown_value(value)} is not allowed; use names, as 'q_proj,v_proj', or a list."
            )
        return ",".join(dict.fromkeys(filter(None, [part.strip() for part in parts])))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Setting(Field):
    """A text that a function reads, and writes in one way; it raises InvalidValue for another text."""

    read: Callable[[str], str]

    def _checked(self, name: str, value: object) -> str:
        if not isinstance(value, str):
            raise InvalidValue(f"{name}={shown_value(value)} is not allowed; use a text.")
        return self.read(value)


def described(default: Any, described_as: Field) -> Any:
    """A field of a dataclass with its default and its description."""
    return field(default=default, metadata={"field": described_as})


def described_fields(kind: Any) -> dict[str, Field]:
    """The descriptions of a dataclass's fields by name; fields without one are left out."""
    return {each.name: each.metadata["field"] for each in fields(kind) if "field" in each.metadata}


def count_or_text(value: object) -> int | str:
    """A text as an integer; the text itself if it is none, to be refused with memplan's own error.

    >>> count_or_text("8"), count_or_text("8.5")
    (8, '8.5')
    """
    text = str(value)
    return int(text) if re.fullmatch(r"[+-]?[0-9]{1,100}", text) else text


def number_or_text(text: str) -> float | str:
    """A text as a number; the text itself if it is none.

    >>> number_or_text("0.5"), number_or_text("half")
    (0.5, 'half')
    """
    try:
        return float(text)
    except ValueError:
        return text
