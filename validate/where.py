"""A filter over cases: `tp>1 and zero==3`, read as an expression of its own and never run as Python."""

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from types import UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from memplan import Plan
from memplan.engines.options import plan_dict
from memplan.engines.torch.options import TorchOptions
from memplan.errors import InvalidValue, MemplanError, reason, shown_value, unknown_name
from memplan.tape import Backend
from validate.cases import FAMILIES, Case, RunsOn, Tensors, family_of
from validate.nogpu import RecordStream
from validate.records import Record

Value = bool | int | float | str | tuple[int, ...] | None
Facts = Mapping[str, Value]
"""Values of a case by field."""

Kind = Literal["number", "flag", "text", "numbers", "texts", "nothing"]

LONGEST: Final = 500
"""Characters of an expression; a longer one is a mistake."""

EXAMPLE: Final = '"tp>1 and zero==3"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A name that an expression can use: what its values are, and whether only a run tells them."""

    kind: Kind
    choices: tuple[str, ...] = ()
    after_run: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """A filter that has been read and found well formed."""

    text: str
    _holds: Callable[[Facts], Value]

    def __call__(self, facts: Facts) -> bool:
        """Whether the case passes; comparisons with unknown values are false."""
        return bool(self._holds(facts))


def _fields_of(owner: type, *, after_run: bool = False) -> dict[str, Field]:
    hints = get_type_hints(owner)
    found = {}
    for field in fields(owner):
        kind, choices = _kind_of(hints[field.name])
        if kind is not None and field.name != "name":
            choices = getattr(field.metadata.get("field"), "choices", choices)
            found[field.name] = Field(kind=kind, choices=choices, after_run=after_run)
    return found


def _kind_of(hint: Any) -> tuple[Kind | None, tuple[str, ...]]:
    """The kind of an annotation, and the texts it allows; None for what an expression cannot hold."""
    if get_origin(hint) in (Union, UnionType):
        hint = next(part for part in get_args(hint) if part is not type(None))
    if get_origin(hint) is Literal:
        return "text", get_args(hint)
    plain: dict[Any, Kind] = {int: "number", float: "number", bool: "flag", str: "text"}
    if get_origin(hint) is tuple:
        return "numbers", ()
    return plain.get(hint), ()


CASE_FIELDS: Final[Mapping[str, Field]] = {
    "case": Field(kind="text"),
    "model": Field(kind="text"),
    "family": Field(kind="text", choices=tuple(FAMILIES)),
    "world_size": Field(kind="number"),
    "n_micro_batches": Field(kind="number"),
    **{name: field for family in FAMILIES.values() for name, field in _fields_of(family).items()},
    **_fields_of(Plan),
    **_fields_of(TorchOptions),
    "device": Field(kind="text", choices=get_args(RunsOn)),
    "gpu": Field(kind="text"),
    "backend": Field(kind="text", choices=get_args(Backend)),
    "rank": Field(kind="number"),
    "tensors": Field(kind="text", choices=get_args(Tensors)),
    "record_stream": Field(kind="text", choices=get_args(RecordStream)),
}
"""The fields of every case: its name, its model's and its plan's fields, where it runs."""

RECORD_FIELDS: Final[Mapping[str, Field]] = {
    **CASE_FIELDS,
    **_fields_of(Record, after_run=True),
    "confirmed": Field(kind="flag", after_run=True),
    "predicted_peak_bytes": Field(kind="number", after_run=True),
    "measured_peak_bytes": Field(kind="number", after_run=True),
}
"""The fields of a record, which a run adds; peaks are of the rank that held most."""


def case_facts(case: Case) -> dict[str, Value]:
    """What is known of a case; None for what its model's family has not."""
    facts: dict[str, Value] = {}
    for name in CASE_FIELDS:
        owner = next((part for part in (case.plan, case.model) if hasattr(part, name)), case)
        facts[name] = getattr(owner, name, None)
    facts |= plan_dict(case.plan)
    return facts | {"case": case.name, "model": case.model.name, "family": family_of(case.model)}


def record_facts(record: Record) -> dict[str, Value]:
    """What is known of a record: its case, and what its run has shown."""
    peaks = record.fullest_peaks
    return {
        **case_facts(Case.from_dict(record.case)),
        **{name: getattr(record, name) for name in _fields_of(Record)},
        "confirmed": record.confirmed,
        "predicted_peak_bytes": peaks[0] if peaks else None,
        "measured_peak_bytes": peaks[1] if peaks else None,
    }


def read_where(text: str, known: Mapping[str, Field] = RECORD_FIELDS) -> Where:
    """The filter that a text states over the fields of `CASE_FIELDS` or `RECORD_FIELDS`.

    Comparisons (chained too), `in`, `and`, `or`, `not`, + - * / // %, `abs(...)`, numbers, texts in quotes,
    True, False, None, and lists of them.

    >>> read_where("tp>1 and zero==3")({"tp": 2, "zero": 3})
    True

    Raises:
        UnknownName, InvalidValue: for what cannot be read, with the nearest field or a way out.
    """
    if len(text) > LONGEST:
        raise InvalidValue(f"an expression of {len(text)} characters is too long; use at most {LONGEST}.")
    try:
        tree = ast.parse(text.strip(), mode="eval")
        term = _Reader(text.strip(), known).term(tree.body)
    except MemplanError:
        raise
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        why = error.msg if isinstance(error, SyntaxError) else reason(error)
        raise InvalidValue(
            f"the expression {shown_value(text)} cannot be read ({why}); join comparisons with and, or, not, "
            f"as {EXAMPLE}."
        ) from None
    if term.kind != "flag":
        raise InvalidValue(
            f"the expression {shown_value(text)} is {SAID[term.kind]}, not true or false; compare it, "
            f"as {EXAMPLE}."
        )
    return Where(text=text, _holds=term.of)


@dataclass(frozen=True, slots=True)
class _Term:
    """A part of an expression: the kind of its values, how to get them, the texts it can be."""

    kind: Kind
    of: Callable[[Facts], Any]
    choices: tuple[str, ...] = ()
    constant: Any = None


_Side = tuple[ast.expr, _Term]

SAID: Final[Mapping[Kind, str]] = {
    "number": "a number",
    "flag": "true or false",
    "text": "a text",
    "numbers": "a list of numbers",
    "texts": "a list of texts",
    "nothing": "None",
}

_ORDERS: Final[Mapping[type[ast.cmpop], Callable[[Any, Any], bool]]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_EQUALITIES: Final[Mapping[type[ast.cmpop], Callable[[Any, Any], bool]]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_ARITHMETIC: Final[Mapping[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class _Reader:
    """Turns a syntax tree into functions of facts; what it does not know it refuses."""

    def __init__(self, text: str, known: Mapping[str, Field]) -> None:
        self.text = text
        self.known = known

    def term(self, node: ast.expr) -> _Term:
        """One part of the expression."""
        match node:
            case ast.Constant(value=value) if value is None or isinstance(value, bool | int | float | str):
                return _Term(_kind_of_value(value), lambda facts: value, constant=value)
            case ast.Name(id=name):
                return self._field(name)
            case ast.BoolOp(op=op, values=values):
                return self._joined(all if isinstance(op, ast.And) else any, values)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                of = self._of_kind("flag", operand).of
                return _Term("flag", lambda facts: not of(facts))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                of = self._of_kind("number", operand).of
                return _Term("number", lambda facts: _known(operator.neg, of(facts)))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                function = _ARITHMETIC[type(op)]
                first, second = self._of_kind("number", left).of, self._of_kind("number", right).of
                return _Term("number", lambda facts: _known(function, first(facts), second(facts)))
            case ast.Call(func=ast.Name(id="abs"), args=[operand], keywords=[]):
                of = self._of_kind("number", operand).of
                return _Term("number", lambda facts: _known(abs, of(facts)))
            case ast.Compare(left=left, ops=ops, comparators=comparators):
                return self._compared([left, *comparators], ops)
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                return self._listed(node, parts)
        raise InvalidValue(
            f"{shown_value(self._source(node))} is not allowed in an expression; use fields, numbers, texts, "
            "comparisons, in, and, or, not, + - * / // % and abs(...)."
        )

    def _source(self, node: ast.expr) -> str:
        return ast.get_source_segment(self.text, node) or ast.unparse(node)

    def _field(self, name: str) -> _Term:
        if name not in self.known:
            if name in RECORD_FIELDS:
                raise InvalidValue(f"{name} is known only after a run; use it with `report --where`.")
            raise unknown_name("field", name, self.known)
        field = self.known[name]
        return _Term(field.kind, lambda facts: facts.get(name), choices=field.choices)

    def _of_kind(self, kind: Kind, node: ast.expr) -> _Term:
        term = self.term(node)
        if term.kind != kind:
            raise InvalidValue(
                f"{self._source(node)} is {SAID[term.kind]}, but {SAID[kind]} is needed here"
                + ("; compare it, as tp>1." if kind == "flag" else ".")
            )
        return term

    def _joined(self, rule: Callable[..., bool], nodes: list[ast.expr]) -> _Term:
        parts = [self._of_kind("flag", node).of for node in nodes]
        return _Term("flag", lambda facts: rule(part(facts) for part in parts))

    def _listed(self, node: ast.expr, nodes: list[ast.expr]) -> _Term:
        parts = [self.term(part) for part in nodes]
        kinds = {part.kind for part in parts}
        if kinds == {"text"}:
            return _Term("texts", lambda facts: tuple(part.of(facts) for part in parts),
                         constant=tuple(part.constant for part in parts))  # fmt: skip
        if kinds == {"number"}:
            return _Term("numbers", lambda facts: tuple(part.of(facts) for part in parts))
        raise InvalidValue(
            f"{self._source(node)} mixes or lacks values; use a list of numbers or a list of texts."
        )

    def _compared(self, nodes: list[ast.expr], ops: list[ast.cmpop]) -> _Term:
        terms = [self.term(node) for node in nodes]
        sides = zip(nodes, terms, strict=True)
        tests = [self._test(a, b, op) for (a, b), op in zip(pairwise(sides), ops, strict=True)]

        def holds(facts: Facts) -> bool:
            values = [term.of(facts) for term in terms]
            return all(test(a, b) for test, (a, b) in zip(tests, pairwise(values), strict=True))

        return _Term("flag", holds)

    def _test(self, left: _Side, right: _Side, op: ast.cmpop) -> Callable[[Any, Any], bool]:
        (first, a), (second, b) = left, right
        kinds = (a.kind, b.kind)
        if isinstance(op, ast.In | ast.NotIn) and kinds in _MEMBERSHIPS:
            if kinds != ("text", "text"):
                self._check_choices(a, b)
            wanted = isinstance(op, ast.In)
            return lambda x, y: x is not None and y is not None and (x in y) is wanted
        if type(op) in _EQUALITIES and (a.kind == b.kind or "nothing" in kinds):
            self._check_choices(a, b)
            return _EQUALITIES[type(op)]
        if type(op) in _ORDERS and kinds == ("number", "number"):
            order = _ORDERS[type(op)]
            return lambda x, y: x is not None and y is not None and order(x, y)
        raise InvalidValue(
            f"{self._source(first)} is {SAID[a.kind]} and {self._source(second)} is {SAID[b.kind]}; "
            f"{_SIGNS[type(op)]!r} does not compare them."
        )

    @staticmethod
    def _check_choices(a: _Term, b: _Term) -> None:
        """Raise for a comparison with a text that the field never has."""
        for field, other in ((a, b), (b, a)):
            constants = other.constant if isinstance(other.constant, tuple) else (other.constant,)
            for constant in constants:
                if field.choices and isinstance(constant, str) and constant not in field.choices:
                    raise unknown_name("value", constant, field.choices)


_MEMBERSHIPS: Final = {("text", "text"), ("text", "texts"), ("number", "numbers")}
_SIGNS: Final[Mapping[type[ast.cmpop], str]] = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.In: "in",
    ast.NotIn: "not in",
    ast.Is: "is",
    ast.IsNot: "is not",
}


def _kind_of_value(value: Any) -> Kind:
    if value is None:
        return "nothing"
    return _kind_of(type(value))[0] or "nothing"


def _known(function: Callable[..., Any], *values: Any) -> Any:
    """The function's value; None where one of its operands, or the quotient, is not known."""
    if any(value is None for value in values):
        return None
    try:
        return function(*values)
    except (ZeroDivisionError, OverflowError):
        return None
