"""Why one plan ranks before another, in words and figures."""

from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import Any, Final

from memplan.command import command_text, estimate_command
from memplan.engines.options import not_usual
from memplan.errors import InvalidValue, shown_value
from memplan.estimate import Estimate
from memplan.hardware import VERDICTS
from memplan.mesh import VIEWS, axis_names, inner_first
from memplan.tables import SAID, notes_text, verdict_text
from memplan.text_tables import text_table, wrapped
from memplan.units import human_bytes, in_unit, table_unit

TIE: Final = 0.01
"""Steps within this fraction of the faster one's time are a tie, since times are rough."""


def is_tie(faster: Estimate, other: Estimate) -> bool:
    """Whether two step times are known and within `TIE` of each other."""
    a, b = faster.step_s, other.step_s
    return a is not None and b is not None and abs(b - a) <= TIE * min(a, b)


def held_bytes(estimated: Estimate) -> int:
    """The most that a GPU may hold (`device_bytes`), which breaks ties.

    Without an allocator, and where what is allocated is too much already, the peak, which takes no replay.
    """
    held = None if estimated.over_bytes else estimated.device_bytes
    return estimated.worst.peak_bytes if held is None else held.high_bytes


def numbered_ties(
    estimates: Iterable[Estimate], *, by_headroom: bool
) -> Iterator[tuple[Estimate, int | None]]:
    """The estimates, each with the number of its tie: plans in a row within `TIE` of the first one's time.

    With `by_headroom` plans of a tie stand in the order of `held_bytes`. None: the time is not known.
    """
    groups: list[list[Estimate]] = []
    for each in estimates:
        if groups and is_tie(groups[-1][0], each):
            groups[-1].append(each)
        else:
            groups.append([each])
    for number, group in enumerate(groups, start=1):
        tied = sorted(group, key=held_bytes) if by_headroom and len(group) > 1 else group
        yield from ((each, None if each.step_s is None else number) for each in tied)


def compare(a: Estimate, b: Estimate) -> str:
    """Which of two plans for the same job is better, and what makes the difference.

    Verdicts are compared first (in the order of `memplan.hardware.VERDICTS`), then step times
    (`memplan.time.step`) unless they tie, then the most bytes that a GPU may hold. Step times are compared
    only if both are known.

    Raises:
        InvalidValue: values that are no estimates, or estimates of different models, clusters or batches.
    """
    _check_same_job(a, b)
    lines = [f"a: {plan_text(a)}", f"b: {plan_text(b)}", "", _verdict(a, b)]
    lines += [f"{name}: {verdict_text(each)}" for name, each in (("a", a), ("b", b))]
    notes = [line for note in notes_text({"a": a, "b": b}) for line in ("", note)]
    return "\n".join([*map(wrapped, lines), "", _table(a, b), *_traffic(a, b), *notes])


why: Final = compare
"""The former name of `compare`."""


def compared_text(a: Estimate, b: Estimate, model: str | None = None) -> str:
    """The text of `compare` and each plan's command; `model`: its name on the command line."""
    commands = [(name, estimate_command(each, model)) for name, each in (("a", a), ("b", b))]
    shown = [command_text(command, head=f"{name}: ") for name, command in commands if command is not None]
    return "\n".join([compare(a, b), *([""] if shown else []), *shown])


def plan_text(estimated: Estimate) -> str:
    """A plan in a line: its mesh, and the other fields that are not at their defaults.

    >>> from memplan import estimate
    >>> plan_text(estimate("gpt2", dp=2, zero=3, global_batch=8, recompute="full"))
    'pp=1 x dp=2 x tp=1, zero=3, recompute=full, micro_batch=1'
    """
    plan = estimated.plan
    parts = [str(plan.mesh)]
    if plan.pp > 1:
        parts.append(f"schedule={plan.schedule}")
    said = (*axis_names(), *VIEWS, "micro_batch", "global_batch", "seq_len", "schedule")
    parts += [f"{name}={value}" for name, value in not_usual(plan).items() if name not in said]
    return ", ".join([*parts, f"micro_batch={plan.micro_batch}"])


def _check_same_job(a: Estimate, b: Estimate) -> None:
    for name, each in (("a", a), ("b", b)):
        if not isinstance(each, Estimate):
            raise InvalidValue(f"{name}={shown_value(each)} is no estimate; use memplan.estimate(...).")
    for what, left, right in (
        ("models", a.model, b.model),
        ("clusters", a.cluster, b.cluster),
        ("devices", a.device.type, b.device.type),
        ("global_batch", a.plan.global_batch, b.plan.global_batch),
        ("seq_len", a.plan.seq_len, b.plan.seq_len),
    ):
        if left != right:
            names = _told_apart(left, right)
            raise InvalidValue(
                f"{what} {names[0]} and {names[1]} differ, so these are different jobs; compare plans of the "
                "same one."
            )


def _told_apart(left: Any, right: Any) -> list[str]:
    """The names of two values that differ; of equal names also the fields in which the values do."""
    names = [shown_value(getattr(value, "name", value)) for value in (left, right)]
    if names[0] != names[1] or type(left) is not type(right):
        return names
    own = [field.name for field in fields(left) if getattr(left, field.name) != getattr(right, field.name)]
    said = [", ".join(f"{name}={shown_value(getattr(each, name))}" for name in own) for each in (left, right)]
    return [f"{name} with {text}" for name, text in zip(names, said, strict=True)]


def _verdict(a: Estimate, b: Estimate) -> str:
    if a.verdict is not None and b.verdict is not None and a.verdict != b.verdict:
        order = sorted((("a", a), ("b", b)), key=lambda pair: VERDICTS.index(pair[1].verdict))
        (better, one), (worse, other) = order
        return f"{better} is better: {SAID[one.verdict]}; of {worse}, {SAID[other.verdict]}."
    if a.step_s is not None and b.step_s is not None and not is_tie(a, b):
        name, fast, slow = ("a", a.step_s, b.step_s) if a.step_s < b.step_s else ("b", b.step_s, a.step_s)
        of_a, of_b = _parts(a), _parts(b)
        parts = {part: of_b.get(part, 0.0) - seconds for part, seconds in of_a.items()}
        most = max(parts, key=lambda part: parts[part] if name == "a" else -parts[part])
        return (
            f"{name} is better: {slow / fast:.2f} times as fast, {slow - fast:.3g} s less a step; most of it "
            f"is {most.removesuffix('_s')} ({abs(parts[most]):.3g} s)."
        )
    less_bytes = held_bytes(b) - held_bytes(a)
    name, lower = "a" if less_bytes > 0 else "b", human_bytes(abs(less_bytes))
    unknown = [name for name, each in (("a", a), ("b", b)) if each.step_s is None]
    if unknown:
        reasons = "; ".join(dict.fromkeys(reason for each in (a, b) for reason in each.time_missing))
        held = f"{name} holds {lower} less" if less_bytes else "both hold the same"
        return f"Which is faster is not known: no step time of {' and '.join(unknown)} ({reasons}); {held}."
    if not less_bytes:
        return "They are equally good; the simpler one stands first in a search."
    return f"{name} is better: as fast (within {TIE:.0%}), and a GPU holds up to {lower} less."


def _parts(estimated: Estimate) -> dict[str, float]:
    return estimated.time.parts if estimated.time is not None else {}


def _table(a: Estimate, b: Estimate) -> str:
    rows: list[tuple[str, ...]] = [("", "a", "b", "a - b")]
    of_a, of_b = _parts(a), _parts(b)
    rows += [
        (part.removesuffix("_s"), *_seconds(of_a.get(part), of_b.get(part)))
        for part in dict.fromkeys((*of_a, *of_b))
        if of_a.get(part) or of_b.get(part)
    ]
    if of_a or of_b:
        rows.append(("step", *_seconds(a.step_s, b.step_s)))
    unit, unit_name = table_unit([a.peak.total_bytes, b.peak.total_bytes])
    for (kind, left), right in zip(a.peak.to_dict().items(), b.peak.to_dict().values(), strict=True):
        name = "peak" if kind == "total_bytes" else kind.removesuffix("_bytes")
        sign = "-" if left < right else "+"
        cells = (in_unit(left, unit), in_unit(right, unit), sign + in_unit(abs(left - right), unit))
        rows.append((name, *(f"{cell} {unit_name}" for cell in cells)))
    return text_table(rows, "<>>>")


def _seconds(left: float | None, right: float | None) -> tuple[str, str, str]:
    """Two times and their difference, or "unknown"."""
    shown = tuple("unknown" if s is None else f"{s:.3f} s" for s in (left, right))
    difference = "unknown" if left is None or right is None else f"{left - right:+.3f} s"
    return shown[0], shown[1], difference


def _traffic(a: Estimate, b: Estimate) -> list[str]:
    rows: list[tuple[str, ...]] = [("sent a step", "a", "b")]
    sent = [dict.fromkeys(dict.fromkeys(c.axis for e in (a, b) for c in e.collectives), 0) for _ in "ab"]
    for axes, each in zip(sent, (a, b), strict=True):
        for c in each.collectives:
            axes[c.axis] += c.wire_bytes
    ordered = list(inner_first(sent[0]))
    unit, name = table_unit([n_bytes for axes in sent for n_bytes in axes.values()])
    rows += [(f"over {axis}", *(f"{in_unit(axes[axis], unit)} {name}" for axes in sent)) for axis in ordered]
    return ["", text_table(rows, "<>>")] if len(rows) > 1 else []
