"""Errors that name the value, the rule that it breaks and a way out."""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from memplan.names import option_of
from memplan.unmodelled import KEYWORDS, not_modelled


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


class MissingPackage(MemplanError):
    """A package that is not installed, or that cannot be imported; `absent` is its name in the first case."""

    def __init__(self, text: str, *, absent: str = "") -> None:
        super().__init__(text)
        self.absent = absent


@contextmanager
def installed(what: str, extra: str) -> Iterator[None]:
    """A block that imports packages: `what` needs them, and memplan's extra of this name installs them.

    Raises:
        MissingPackage: one of them is not installed, or cannot be imported, with the way out.
    """
    try:
        yield
    except MemplanError:
        raise
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        if isinstance(cause, ModuleNotFoundError) and cause.name:
            absent = cause.name.partition(".")[0]
            raise MissingPackage(
                f"{what} needs {absent}, which is not installed; use pip install 'memplan[{extra}]'.",
                absent=absent,
            ) from error
        package = _imported(cause)
        raise MissingPackage(
            f"{what} needs {package}, which is installed but cannot be imported ({reason(cause)}); use "
            f"pip install --force-reinstall {package}, or pip uninstall {package} if it is optional."
        ) from error


def _imported(error: BaseException) -> str:
    """The package whose import fails, by the frames of its error: the first that is no importer."""
    from traceback import walk_tb  # slow to import, and rarely needed

    names = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)]
    packages = [name.partition(".")[0] for name in names]
    found = [each for each in packages if each not in ("memplan", "validate", "importlib", "")]
    return next((each for each in found if each != "transformers"), found[0] if found else "a package")


def kind_of(error: MemplanError) -> str:
    """The kind of a refusal; the text of another error."""
    return error.kind if isinstance(error, Refusal) else str(error)


def shown_value(value: object, most: int = 40) -> str:
    """A value's `repr`, cut to `most` characters, for an error's text.

    >>> shown_value("8.5"), len(shown_value("x" * 1000)), shown_value(10**10000)
    ("'8.5'", 40, 'a number of thousands of digits')
    >>> print(shown_value([{"a": 1, "b": (2,)}, (), [3.0, None]]))
    [{'a': 1, 'b': (2,)}, (), [3.0, None]]
    """
    text = ""
    try:
        for part in _parts(value):
            text += part
            if len(text) > most:
                return f"{text[: most - 3]}..."
    except ValueError:
        return "a number of thousands of digits"
    return text


def _parts(value: object) -> Iterator[str]:
    """A value's `repr` in parts: that of lists which share others by reference may be of any length."""
    if not (type(value) is dict or type(value) is list or type(value) is tuple):
        yield repr(value)
        return
    begin, end = {dict: ("{", "}"), list: ("[", "]"), tuple: ("(", ")")}[type(value)]
    yield begin
    for i, each in enumerate(value):
        yield ", " if i else ""
        yield from _parts(each)
        if isinstance(value, dict):
            yield ": "
            yield from _parts(value[each])
    yield f",{end}" if isinstance(value, tuple) and len(value) == 1 else end


def reason(error: BaseException, most: int = 160) -> str:
    r"""The first sentence of another program's error, on one line, for an error's text.

    >>> dump = "Could not run 'aten::neg' on CUDA. If you are a Facebook employee ...\n\nCPU: registered"
    >>> reason(NotImplementedError(dump)), reason(ValueError("a\nb")), reason(KeyError())
    ("Could not run 'aten::neg' on CUDA", 'a b', 'KeyError')
    """
    text = (isinstance(error, OSError) and error.strerror) or str(error)
    first = re.split(r"\.\s+(?=[A-Z])", " ".join(text[: 10 * most].split()))[0].rstrip(".;: ")
    shown = first if first.isprintable() else repr(first)[1:-1]
    return (shown if len(shown) <= most else f"{shown[: most - 3]}...") or type(error).__name__


def unknown_name(what: str, name: object, known: Iterable[str], listed: str = "") -> UnknownName:
    """The error for a name that is not in a table, with the names that may have been meant.

    `listed`: a sentence on where the names of a long table are listed, which are not repeated then. A name of
    something that is not modelled yet (`memplan.unmodelled`) is said to be so.

    >>> print(unknown_name("model", "lama-2-7b", ["gpt2", "llama-2-7b"]))
    unknown model 'lama-2-7b'; did you mean 'llama-2-7b'? Known: gpt2, llama-2-7b.
    """
    names = sorted(known)
    shown = name[:60] if isinstance(name, str) else shown_value(name)
    if (sentence := not_modelled(what, shown)) is not None:
        return UnknownName(sentence)
    if what.endswith(KEYWORDS) and (option := option_of(shown)) is not None:
        return UnknownName(f"{shown} is called {option} in memplan; use that.")
    listed = listed or f"Known: {_in_short(names)}."
    return UnknownName(f"unknown {what} {shown!r}{did_you_mean(shown, names)} {listed}")


def _in_short(names: Sequence[str], most: int = 240) -> str:
    """The names, of a long list the first ones and how many more there are: about `most` characters.

    >>> _in_short(["adam", "lion", "sgd"]), _in_short(["adam", "lion", "sgd"], most=10)
    ('adam, lion, sgd', 'adam, lion, and 1 more (see --help)')
    """
    text = ", ".join(names)
    if len(text) <= most:
        return text
    shown = text[: text.rindex(", ", 0, most + 2)]
    return f"{shown}, and {len(names) - shown.count(', ') - 1} more (see --help)"


def did_you_mean(name: str, known: Iterable[str], most: int = 4) -> str:
    """The end of an error's first line: the known names that start with `name`, or the nearest one.

    A name is near if `difflib` finds them similar by 0.7 or more.

    >>> did_you_mean("h100", ["h100-sxm", "h100-pcie", "h200"])
    "; did you mean 'h100-sxm' or 'h100-pcie'?"
    >>> did_you_mean("h10-sxm", ["h100-sxm", "v100"]), did_you_mean("", ["v100"])
    ("; did you mean 'h100-sxm'?", '.')
    >>> did_you_mean("deepseek-v3", ["resnet-50", "gpt2"])
    '.'
    """
    from difflib import get_close_matches  # slow to import, and rarely needed

    names, asked = list(known), name.strip().lower()
    begun = [each for each in names if asked and each.lower().startswith(asked)]
    near = begun[:most] or get_close_matches(asked, names, n=1, cutoff=0.7)
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
