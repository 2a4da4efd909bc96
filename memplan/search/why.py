"""Why one plan ranks before another, in words and figures."""

from collections.abc import Iterator

from memplan.errors import InvalidValue
from memplan.estimate import Estimate
from memplan.layout import text_table
from memplan.shapes import KINDS
from memplan.units import human_bytes


def why(a: Estimate, b: Estimate) -> str:
    """Which of two plans for the same job is better, and what makes the difference.

    What fits is better than what does not; then the shorter step, then the lower peak. Seconds are those of
    `memplan.steptime`.

    Raises:
        InvalidValue: estimates of different models, clusters or batches, which compare as nothing.
    """
    _check_same_job(a, b)
    lines = [f"a: {plan_text(a)}", f"b: {plan_text(b)}", "", _verdict(a, b)]
    return "\n".join([*lines, *_fit(a, b), "", _table(a, b), *_traffic(a, b)])


def plan_text(estimated: Estimate) -> str:
    """A plan in a line: its mesh, and what else is not as usual.

    >>> from memplan import estimate
    >>> plan_text(estimate("gpt2", dp=2, zero=3, global_batch=8, recompute="full"))
    'pp=1 x dp=2 x tp=1, zero=3, recompute=full, micro_batch=1'
    """
    plan = estimated.plan
    parts = [plan.mesh_text]
    if plan.pp > 1:
        parts.append(f"schedule={plan.schedule}")
    for name in ("virtual_stages", "zero", "sequence_parallel", "recompute", "recompute_blocks", "offload"):
        value = getattr(plan, name)
        if value != type(plan).__dataclass_fields__[name].default:
            parts.append(f"{name}={value}")
    return ", ".join([*parts, f"micro_batch={plan.micro_batch}"])


def _check_same_job(a: Estimate, b: Estimate) -> None:
    for name, left, right in (
        ("model", a.model.name, b.model.name),
        ("cluster", a.cluster and a.cluster.name, b.cluster and b.cluster.name),
        ("global_batch", a.plan.global_batch, b.plan.global_batch),
        ("seq_len", a.plan.seq_len, b.plan.seq_len),
    ):
        if left != right:
            raise InvalidValue(
                f"{name}={left!r} and {name}={right!r} are different jobs; compare plans of the same one."
            )


def _verdict(a: Estimate, b: Estimate) -> str:
    fits = {True: 0, None: 0, False: 1}
    worse_fit = fits[a.fits] - fits[b.fits]
    if worse_fit:
        return f"{'b' if worse_fit > 0 else 'a'} is better: it fits, the other does not."
    if a.step_s is not None and b.step_s is not None and a.step_s != b.step_s:
        name, fast, slow = ("a", a.step_s, b.step_s) if a.step_s < b.step_s else ("b", b.step_s, a.step_s)
        of_a = _parts(a)
        parts = {part: seconds - of_a[part] for part, seconds in _parts(b).items()}
        most = max(parts, key=lambda part: parts[part] if name == "a" else -parts[part])
        return (
            f"{name} is better: {slow / fast:.2f} times as fast, {slow - fast:.3g} s less a step; most of it "
            f"is {most.removesuffix('_s')} ({abs(parts[most]):.3g} s)."
        )
    held = a.peak.total_bytes, b.peak.total_bytes
    if held[0] == held[1]:
        return "They are equally good; the simpler one stands first in a search."
    name = "a" if held[0] < held[1] else "b"
    return f"{name} is better: as fast, and {human_bytes(abs(held[0] - held[1]))} less at the peak."


def _fit(a: Estimate, b: Estimate) -> Iterator[str]:
    for name, each in (("a", a), ("b", b)):
        if each.cluster is None or each.cluster.budget_bytes is None:
            continue
        spare = each.cluster.budget_bytes - each.peak.total_bytes
        verb = "fits with" if spare >= 0 else "does not fit:"
        rest = "to spare" if spare >= 0 else "too much"
        worst = each.worst
        yield f"{name} {verb} {human_bytes(abs(spare))} {rest}, on stage {worst.stage}: {worst.when}."


def _parts(estimated: Estimate) -> dict[str, float]:
    return estimated.time.parts if estimated.time is not None else {}


def _table(a: Estimate, b: Estimate) -> str:
    rows = [("", "a", "b", "a - b")]
    of_b = _parts(b)
    for part, left in _parts(a).items():
        right = of_b[part]
        rows.append((part.removesuffix("_s"), f"{left:.3f} s", f"{right:.3f} s", f"{left - right:+.3f} s"))
    if a.step_s is not None and b.step_s is not None:
        rows.append(("step", f"{a.step_s:.3f} s", f"{b.step_s:.3f} s", f"{a.step_s - b.step_s:+.3f} s"))
    for kind in (*KINDS, "total"):
        left, right = (getattr(each.peak, f"{kind}_bytes") for each in (a, b))
        name = "peak" if kind == "total" else kind
        rows.append((name, human_bytes(left), human_bytes(right), _signed(left - right)))
    return text_table(rows, "<>>>")


def _signed(n_bytes: int) -> str:
    return f"{'-' if n_bytes < 0 else '+'}{human_bytes(abs(n_bytes))}"


def _traffic(a: Estimate, b: Estimate) -> list[str]:
    rows: list[tuple[str, ...]] = [("sent a step", "a", "b")]
    sent = [dict.fromkeys(dict.fromkeys(c.axis for e in (a, b) for c in e.collectives), 0) for _ in "ab"]
    for axes, each in zip(sent, (a, b), strict=True):
        for c in each.collectives:
            axes[c.axis] += c.wire_bytes
    rows += [(f"over {axis}", *(human_bytes(axes[axis]) for axes in sent)) for axis in sent[0]]
    return ["", text_table(rows, "<>>")] if len(rows) > 1 else []
