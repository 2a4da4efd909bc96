"""Estimates as tables: text for a terminal of 80 columns, and pandas frames.

Text needs nothing but this module; frames need pandas, which is imported when one is made.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final, cast

from memplan.command import command_text, estimate_command
from memplan.engines.options import not_usual
from memplan.estimate import Estimate, StageEstimate
from memplan.hardware import Cluster, Verdict
from memplan.mesh import VIEWS, axis_names
from memplan.plan import Plan
from memplan.shapes import KINDS, Buffer
from memplan.text_tables import frame, interval_text, margin_text, printable, text_table, wrapped
from memplan.units import binary_unit, human_bytes, in_unit, scaled, table_unit, time_unit

if TYPE_CHECKING:
    import pandas

MOST_STAGES: Final = 24
"""The most pipeline stages that are printed; of more only the first, the last and the worst."""

BRIEF_KINDS: Final = dict(zip(KINDS, ("weights", "grads", "optim.", "activ.", "temp."), strict=True))

LEDGER_COLUMNS: Final = ("name", "kind", "shape", "dtype", "count", "each_bytes", "total_bytes")

HEADED: Final = (
    "zero",
    "sequence_parallel",
    "schedule",
    "micro_batch",
    "global_batch",
    "seq_len",
)
"""The fields of a plan, beside the axes of its mesh, in the lines "mesh" and "batch"."""

ALWAYS: Final = ("precision", "optimizer", "recompute")
"""The fields that the line "options" shows even at their defaults."""

# --- Frames -----------------------------------------------------------------------------------------------


def ledger_rows(alive: Mapping[Buffer, int]) -> list[dict[str, Any]]:
    """Rows of the buffers alive, largest first; their `total_bytes` add up to all bytes alive.

    Buffers of the same name, kind, shape, type and size share a row.

    >>> from memplan.shapes import FP32
    >>> w = Buffer("wq", (2, 3), FP32, 24, "weights")
    >>> again = Buffer("wq", (2, 3), FP32, 24, "weights")
    >>> ledger_rows({w: 2, again: 1, Buffer("x", (), FP32, 4, "grads"): 0})
    [{'name': 'wq', 'kind': 'weights', 'shape': (2, 3), 'dtype': 'float32', 'count': 3, 'each_bytes': 24,
      'total_bytes': 72}]
    """
    counts: Counter[tuple[Any, ...]] = Counter()
    for buffer, n in alive.items():
        counts[buffer.name, buffer.kind, buffer.shape, buffer.dtype.name, buffer.n_bytes] += n
    rows = [
        dict(zip(LEDGER_COLUMNS, (*named, n, each_bytes, n * each_bytes), strict=True))
        for (*named, each_bytes), n in counts.items()
        if n
    ]
    return sorted(rows, key=lambda row: cast(int, row["total_bytes"]), reverse=True)


def ledger_frame(alive: Mapping[Buffer, int]) -> "pandas.DataFrame":
    """`ledger_rows` as a frame.

    Raises:
        MemplanError: if pandas is not installed.
    """
    return frame(ledger_rows(alive), LEDGER_COLUMNS)


def stages_frame(estimate: Estimate) -> "pandas.DataFrame":
    """One row per pipeline stage: its layers, its peak in bytes by kind and its instant, its step, the batch.

    Raises:
        MemplanError: if pandas is not installed.
    """
    rows = [
        {
            "stage": s.stage,
            "layers": layers_text(s.layers),
            "n_layers": sum(map(len, s.layers)),
            **s.peak.to_dict(),
            "rest_bytes": s.rest_bytes,
            "when": s.when,
            "step_s": None if time is None else time.total_s,
            "global_batch": estimate.plan.global_batch,
            "micro_batch": estimate.plan.micro_batch,
            "n_micro_batches": estimate.plan.n_micro_batches,
        }
        for s, time in zip(estimate.stages, estimate.stage_times or repeat(None), strict=False)
    ]
    return frame(rows, tuple(rows[0]))


def figures_of(estimate: Estimate) -> dict[str, Any]:
    """The verdict and the figures of a plan in a table of plans, by column.

    What a GPU holds, which takes a replay, is None where what is allocated is too much already.
    """
    held = None if estimate.over_bytes else estimate.device_bytes
    return {
        "verdict": estimate.verdict,
        "device_low_bytes": None if held is None else held.low_bytes,
        "device_high_bytes": None if held is None else held.high_bytes,
        "peak_bytes": estimate.worst.peak_bytes,
        "step_s": estimate.step_s,
    }


# --- Text -------------------------------------------------------------------------------------------------


def estimate_text(estimate: Estimate, model: str | None = None, *, details: bool = False) -> str:
    """The text of `print(estimate)`: the verdict, the plan, the bytes, the time, notes, what to run next.

    Every line has at most `WIDTH` characters; every number of bytes has its unit. `model`: how the model was
    named on the command line. `details`: also the verdict's reasons, every collective, and the time's parts.
    """
    parts = [f"{headline(estimate)}\n{_plan(estimate)}", _stages(estimate), _summary(estimate)]
    if details:
        if (where := estimate.cluster) is not None:
            parts.append(wrapped(f"{printable(where.name)}: {cluster_text(where)}"))
        parts += [_verdict(estimate), _host(estimate), _collectives(estimate), _time(estimate)]
    parts += notes_text({"": estimate})
    parts.append("\n".join(map(wrapped, [*disagreement(estimate), trust_text(estimate)])))
    if (command := next_command(estimate, model)) is not None:
        parts.append(f"Next: {command_text(command, head='      ').lstrip()}")
    return "\n\n".join(part for part in parts if part)


def headline(estimate: Estimate) -> str:
    """The verdict in a line: model, GPUs, bytes on a GPU against what it has, tokens per second.

    >>> from memplan import estimate
    >>> print(headline(estimate("gpt2", cluster="1xh100-sxm")))
    gpt2 on 1xh100-sxm FITS: 3.0-4.1 of 79.1 GiB, 81k-110k tokens/s
    """
    return wrapped(f"{finding(estimate)}{_rate_text(estimate)}", indent="    ")


def finding(estimate: Estimate) -> str:
    """The verdict without the rate, in one line of any length: model, GPUs, bytes against what a GPU has."""
    cluster, held, verdict = estimate.cluster, estimate.device_bytes, estimate.verdict
    where = "" if cluster is None else f" on {printable(cluster.name)}"
    usable_bytes = None if cluster is None else cluster.gpu.usable_bytes
    if verdict is None or usable_bytes is None:
        rank = "a rank" if estimate.device.on_cpu else "a GPU"
        if estimate.engine.is_accounting:
            why = f"no verdict ({estimate.plan.engine} accounting)"
        else:
            why = "no verdict without a cluster" if cluster is None else "no limit is known"
        said = f": {human_bytes(estimate.peak.total_bytes)} of tensors {rank}; {why}"
    elif held is None:
        unit, name = binary_unit(usable_bytes)
        least, usable = (scaled(n, unit, 1) for n in (estimate.worst.peak_bytes, usable_bytes))
        said = f" {verdict.upper()}: at least {least} of {usable} {name}"
    else:
        unit, name = binary_unit(usable_bytes)
        low, high, usable = (scaled(n, unit, 1) for n in (*held, usable_bytes))
        said = f" {verdict.upper()}: {low}-{high} of {usable} {name}"
    return f"{printable(estimate.model.name)}{where}{said}"


def _rate_text(estimate: Estimate) -> str:
    """The rate for the first line, as an interval where runs were compared; empty where none is known."""
    band, rate = estimate.tokens_per_s_band, estimate.tokens_per_s
    if rate is None:
        return ""
    said = "-".join(map(_rounded, (rate,) if band is None else band))
    return f", {said} {counted_in(estimate.plan.seq_len)}/s"


def _rounded(per_s: float) -> str:
    """A rate to two digits.

    >>> _rounded(38_637.0), _rounded(1_234_567.0), _rounded(123.0), _rounded(0.123)
    ('39k', '1.2M', '120', '0.12')
    """
    rate = float(f"{per_s:.2g}")
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if rate >= unit:
            return f"{rate / unit:g}{name}"
    return f"{rate:g}"


def _plan(estimate: Estimate) -> str:
    """The plan in two lines, with what was left to its defaults."""
    model, plan = estimate.model, estimate.plan
    how = [str(plan.mesh), f"zero={plan.zero}", *(["sequence_parallel"] if plan.sequence_parallel else [])]
    how += [f"schedule={plan.schedule}"] if plan.pp > 1 else []
    options = {name: getattr(plan, name) for name in ALWAYS} | not_usual(plan)
    how += [
        f"{name}={value}" for name, value in options.items() if name not in (*HEADED, *axis_names(), *VIEWS)
    ]
    layers = f"{model.n_blocks} layers" if model.n_blocks else "no repeated blocks"
    size = f"{estimate.n_parameters:,} parameters, {layers}; code: {estimate.engine.code or model.code}"
    return "\n".join(map(wrapped, [f"{', '.join(how)}; {batch_text(plan)}", size]))


def _rate_remark(estimate: Estimate) -> str:
    """MFU and how far published runs were off, in brackets; a stated efficiency instead of both."""
    band, where = estimate.time_model.band, estimate.cluster
    if where is not None and where.efficiency is not None:
        return f" (products at {where.efficiency:.0%} of the peak rate, as you said)"
    off = (
        "" if band is None else f"; nine in ten published runs had {band.low} to {band.high} times this rate"
    )
    return f" (MFU {estimate.mfu or 0.0:.0%}{off})"


def _summary(estimate: Estimate) -> str:
    """The step's time, its traffic, and the flag that shows more of both."""
    parts, missing = [], ""
    if (step_s := estimate.step_s) is not None:
        unit, name = time_unit(step_s)
        parts.append(f"a step takes {scaled(step_s, unit, 2)} {name}{_rate_remark(estimate)}")
    else:
        missing = f"No step time: {'; '.join(estimate.time_missing)}. "
    if sent_bytes := estimate.busiest.sent_bytes:
        parts.append(f"a GPU sends {human_bytes(sent_bytes)}")
    if host_bytes := estimate.host.total_bytes:
        parts.append(f"the host holds {human_bytes(host_bytes)} for each GPU")
    figures = ", ".join(parts)
    said = f"{figures[0].upper()}{figures[1:]}. " if figures else ""
    return wrapped(f"{missing}{said}More: --details, --ledger.")


SAID: Final[dict[Verdict | None, str]] = {
    "fits": "it fits",
    "fits, tight": "it fits tightly",
    "cannot say": "it may or may not fit",
    "does not fit": "it does not fit",
}
"""Verdicts as parts of a sentence about a plan."""

TRUST: Final = {
    "cpu-ranks": "Bytes checked by real runs on CPU ranks (python -m validate).",
    "nogpu": "Bytes checked for {gpu} by PyTorch's real CUDA software without a GPU, which gives NVIDIA's "
    "own bytes of H100 and A100 runs within 0.28%.",
    "unconfirmed": "No run has checked these bytes.",
}
"""What the rules were compared with, by `Estimate.confirmed`."""


def trust_text(estimate: Estimate) -> str:
    """What has confirmed the bytes, in a sentence."""
    if estimate.engine.assumes:
        return estimate.engine.assumes
    if not estimate.device.has_rules:
        return "Bytes by CUDA's rules: nothing is known here of ROCm's kernels and allocator, so no verdict."
    if estimate.confirmed == "unconfirmed" and not estimate.device.on_cpu:
        if estimate.engine.compared_with:
            return estimate.engine.compared_with
        known = ", ".join(estimate.engine.confirmed_gpus)
        return f"Bytes by CUDA's rules, not checked for this GPU{f' (only for {known})' if known else ''}."
    gpu = "an H100, since no GPU was named," if estimate.cluster is None else "this GPU"
    return TRUST[estimate.confirmed].format(gpu=gpu)


def disagreement(estimate: Estimate) -> list[str]:
    """The other implementations of the model whose verdict on this plan is another one, in a line."""
    others = [
        f"as {each.model.implementation}'s code {SAID[each.verdict]} ({interval_text(each.device_bytes)})"
        for each in estimate.other_implementations
        if each.verdict != estimate.verdict and each.device_bytes is not None
    ]
    own = f"The verdict is of {estimate.model.implementation}'s code"
    return [f"{own}; {'; '.join(others)} (--implementation)."] if others else []


def next_command(estimate: Estimate, model: str | None = None) -> str | None:
    """The command to run after this estimate; None for a model or a cluster that no command line can name."""
    command = estimate_command(estimate, model)
    if command is None:
        return None
    if estimate.cluster is None and not estimate.device.on_cpu:
        return f"{command} --cluster {estimate.plan.world_size}xh100-sxm"
    if estimate.fits is False or estimate.verdict == "cannot say":
        return command.replace("memplan estimate", "memplan advise", 1)
    from memplan.launchers import targets  # they are read only for a plan that may be run

    to = next(iter(targets(estimate)), None)
    if to is None:
        return f"{command} --details"
    return f"{command.replace('memplan estimate', 'memplan export', 1)} --to {to}"


def notes_text(estimates: Mapping[str, Estimate], what: str = "plan") -> Iterator[str]:
    """The notes on plans by name, each in lines of its own, with the plans that it is on unless on all."""
    noted: dict[str, list[str]] = {}
    for name, estimate in estimates.items():
        for note in estimate.notes:
            noted.setdefault(note, []).append(name)
    for note, on in noted.items():
        plans = "" if len(on) == len(estimates) else f" on {what}{'s' * (len(on) > 1)} {', '.join(on)}"
        yield wrapped(f"Note{plans}: {note}")


def ledger_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """A ledger as a table for a terminal, with its sum below."""
    cells = [("kind", "name", "type", "shape", "count", "total bytes")]
    for row in rows:
        shape = "x".join(map(str, row["shape"])) or "scalar"
        total = f"{row['total_bytes']:,}"
        cells.append((BRIEF_KINDS[row["kind"]], row["name"], row["dtype"], shape, f"{row['count']:,}", total))
    total_bytes = sum(row["total_bytes"] for row in rows)
    return (
        f"{text_table(cells, '<<<<>>', flexible=[1])}\n\n{human_bytes(total_bytes)} = {total_bytes:,} bytes"
    )


def batch_text(plan: Plan) -> str:
    """The division of a step's tokens into micro-batches, in words.

    >>> batch_text(Plan(dp=2, micro_batch=2, global_batch=24, seq_len=8))
    '24 x 8 tokens; 6 micro-batches of 2 for each of 2 replicas (gradient accumulation)'
    >>> batch_text(Plan(micro_batch=256, global_batch=256, seq_len=1))
    '256 samples; 1 micro-batch of 256'
    """
    n, replicas = plan.n_micro_batches, plan.n_replicas
    passes = f"{n} micro-batch{'es' * (n > 1)} of {plan.micro_batch}"
    each = f" for each of {replicas} replicas" if replicas > 1 else ""
    again = " (gradient accumulation)" if n > 1 and plan.pp == 1 else ""
    return f"{step_text([plan.global_batch], [plan.seq_len])}; {passes}{each}{again}"


def step_text(batches: Sequence[int], seq_lens: Sequence[int]) -> str:
    """What a step trains on, in words: sequences of tokens, or samples.

    >>> step_text([24], [8]), step_text([1], [1]), step_text([8, 16], [1])
    ('24 x 8 tokens', '1 sample', '8 or 16 samples')
    """
    sequences, lengths = (" or ".join(map(str, values)) for values in (batches, seq_lens))
    if counted_in(max(seq_lens)) == "tokens":
        return f"{sequences} x {lengths} tokens"
    return f"{sequences} sample{'s' * (max(batches) > 1)}"


def counted_in(seq_len: int) -> str:
    """What sequences of this length are counted in: "tokens", or "samples" if each is of length 1."""
    return "tokens" if seq_len > 1 else "samples"


def cluster_text(cluster: Cluster) -> str:
    """The nodes of a cluster and their links, in words.

    >>> from memplan.hardware import cluster
    >>> cluster_text(cluster("16xh100-sxm")), cluster_text(cluster("1xcpu"))
    ('2 nodes of 8 (NVLink 4), InfiniBand NDR of 400 Gbit/s for each GPU', '1 node of 1')
    """
    n, each = cluster.n_nodes, cluster.gpus_per_node
    inside = f" ({printable(cluster.intra_node.name)})" if each > 1 else ""
    nodes = f"{n} node{'s' * (n > 1)} of {each}{inside}"
    if n == 1:
        return nodes
    rate = cluster.inter_node.bytes_per_s
    gbit = "" if rate is None else f" of {8 * rate / 1e9:g} Gbit/s for each GPU"
    return f"{nodes}, {printable(cluster.inter_node.name)}{gbit}"


def _stages(estimate: Estimate) -> str:
    """The worst instant of each stage by kind; and the most of each kind, which has instants of its own."""
    unit, name = table_unit([estimate.peak.total_bytes])
    digits = 2 if estimate.peak.total_bytes < 100 * unit else 1
    several = len(estimate.stages) > 1
    head = ("stage", "layers") if several else ("",)
    rows: list[tuple[str, ...]] = [
        (*head, *BRIEF_KINDS.values(), "total", *(("worst in",) if several else ()))
    ]
    expected = 0
    for stage in _stages_shown(estimate):
        if stage.stage > expected:
            rows.append(("...",) * len(rows[0]))
        expected = stage.stage + 1
        numbers = [scaled(n_bytes, unit, digits) for n_bytes in stage.peak.to_dict().values()]
        instant = _brief(stage.when.split(",")[0].replace(":", ""))
        if several:
            rows.append((str(stage.stage), layers_text(stage.layers), *numbers, instant))
        else:
            rows.append((f"worst instant: {instant}", *numbers))
    most = [scaled(max(s.most[kind] for s in estimate.stages), unit, digits) for kind in KINDS]
    rows.append(
        ("any", "", *most, "-", "most of each") if several else ("most of each, at any instant", *most, "-")
    )
    if several:
        title = f"{name} on the GPU that holds most, at the worst instant of each stage"
        return f"{title}\n{text_table(rows, '><>>>>>><', flexible=[8])}"
    return f"{name} on the GPU that holds most\n{text_table(rows, '<>>>>>>', flexible=[0])}"


def _stages_shown(estimate: Estimate) -> list[StageEstimate]:
    stages = estimate.stages
    if len(stages) <= MOST_STAGES:
        return list(stages)
    ends = MOST_STAGES // 3
    shown = {*range(ends), estimate.worst.stage, *range(len(stages) - ends, len(stages))}
    return [stages[i] for i in sorted(shown)]


def layers_text(layers: Sequence[range]) -> str:
    """The blocks of a rank's stages.

    >>> layers_text([range(4), range(8, 9)])
    '0-3, 8'
    """
    return ", ".join(f"{r.start}-{r.stop - 1}" if len(r) > 1 else f"{r.start}" for r in layers)


def _brief(text: str) -> str:
    return text.replace("backward", "bwd").replace("forward", "fwd")


def _verdict(estimate: Estimate) -> str:
    where = f"stage {estimate.worst.stage}, " if len(estimate.stages) > 1 else ""
    lines = [f"Peak of tensors {human_bytes(estimate.peak.total_bytes)}: {where}{estimate.worst.when}."]
    allocated_bytes, reserved_bytes = estimate.allocated_bytes, estimate.reserved_bytes
    if allocated_bytes is not None and reserved_bytes is not None:
        allocates, reserves = human_bytes(allocated_bytes), human_bytes(reserved_bytes)
        lines.append(f"The caching allocator allocates {allocates} for it and reserves {reserves}.")
    return "\n".join(map(wrapped, (*lines, verdict_text(estimate))))


def verdict_text(estimate: Estimate) -> str:
    """The verdict with its reasons: the interval of bytes on a GPU, the usable bytes, and the margin.

    >>> from memplan import estimate
    >>> print(verdict_text(estimate("gpt2", cluster="1xh100-sxm")))
    FITS: a GPU holds 2.96 to 4.11 GiB (CUDA's context and NCCL's buffers included); up to 75.15 GiB fit
    (79.11 GiB usable, less a margin of 5%).
    """
    cluster, held, verdict = estimate.cluster, estimate.device_bytes, estimate.verdict
    if estimate.engine.is_accounting:
        return f"No verdict: {estimate.plan.engine} accounting says nothing of whether a plan fits."
    if held is None and estimate.device.on_cpu:
        return "No verdict: CPU ranks have no limit."
    if held is None:
        tensors = human_bytes(estimate.worst.peak_bytes)
        holds = f"a GPU holds at least {tensors} of tensors (what engine {estimate.plan.engine}'s allocator "
        holds += "reserves is not known)"
    else:
        holds = f"a GPU holds {interval_text(held)} (CUDA's context and NCCL's buffers included)"
    if cluster is None or verdict is None:
        return (
            f"No verdict: {'no cluster was given' if cluster is None else 'the GPU has no limit'}; {holds}."
        )
    usable_bytes, budget_bytes = cluster.gpu.usable_bytes or 0, cluster.budget_bytes or 0
    usable = f"{human_bytes(usable_bytes)} usable, {margin_text(cluster.margin)}"
    if not estimate.device.has_rules and verdict == "cannot say":
        return (
            f"CANNOT SAY: by CUDA's rules {holds}; what ROCm's kernels and allocator hold is not known here."
        )
    if verdict == "fits":
        return f"FITS: {holds}; up to {human_bytes(budget_bytes)} fit ({usable})."
    if verdict == "fits, tight":
        return (
            f"FITS, TIGHT: {holds} if nothing limits the allocator; up to {human_bytes(budget_bytes)} fit "
            f"({usable}). It keeps within by giving cached blocks back, which takes time."
        )
    if verdict == "does not fit":
        return f"DOES NOT FIT: {holds}; {human_bytes(usable_bytes)} are usable."
    return (
        f"CANNOT SAY: {holds}; up to {human_bytes(budget_bytes)} fit ({usable}), more than "
        f"{human_bytes(usable_bytes)} do not."
    )


def _host(estimate: Estimate) -> str:
    held = estimate.host
    if not held.total_bytes:
        return ""
    unit, name = binary_unit(held.total_bytes)
    parts = ", ".join(f"{BRIEF_KINDS[kind]} {scaled(n, unit, 2)}" for kind in KINDS if (n := held.of(kind)))
    pinned = human_bytes(max(stage.host_pinned_bytes for stage in estimate.stages))
    total = f"Host {human_bytes(held.total_bytes)} for each GPU, {pinned} of it page-locked: {name} of"
    return "\n".join(map(wrapped, (total, parts)))


def _time(estimate: Estimate) -> str:
    """The step's seconds, and the parts of them that are not 0."""
    time = estimate.time
    if time is None:
        return wrapped(f"No step time: {'; '.join(estimate.time_missing)}.")
    unit, name = time_unit(time.total_s)
    rate, each = estimate.tokens_per_s or 0.0, estimate.tokens_per_s_per_gpu or 0.0
    counted = counted_in(estimate.plan.seq_len)
    total = f"Step {scaled(time.total_s, unit, 2)} {name}: {_rate(rate)} {counted}/s, "
    total += f"{_rate(each)} per GPU, MFU {estimate.mfu or 0.0:.1%}"
    divided = [axis for axis in estimate.plan.mesh.dividing if axis != "tp"]
    names = {"tp_s": " and ".join(["tp", *divided])} if divided else {}
    shown = [(part, s) for part, s in time.parts.items() if s >= unit / 200]
    parts = [f"{names.get(part, part.removesuffix('_s'))} {scaled(s, unit, 2)}" for part, s in shown]
    return "\n".join(map(wrapped, (total, f"= {' + '.join(parts)}", estimate.time_model.label)))


def _rate(per_s: float) -> str:
    """A rate for people.

    >>> _rate(39295.4), _rate(0.1234)
    ('39,295', '0.123')
    """
    return f"{per_s:,.0f}" if 100 <= per_s < 1e12 else f"{per_s:.3g}"


def _collectives(estimate: Estimate) -> str:
    busiest = estimate.busiest
    calls = sorted(busiest.collectives, key=lambda c: c.wire_bytes, reverse=True)
    if not calls:
        return "No collectives." if estimate.plan.world_size == 1 else ""
    unit, name = table_unit(c.payload_bytes for c in calls)
    rows = [("collective", "axis", "what", "calls", f"payload {name}", f"wire {name}")]
    for c in calls:
        payload, sent = (in_unit(n, unit) for n in (c.payload_bytes, c.wire_bytes))
        rows.append((c.kind, c.axis, _brief(c.what), f"{c.calls:,}", payload, sent))
    wire = human_bytes(busiest.sent_bytes)
    pcie = sum(c.wire_bytes for c in calls if c.axis == "host")
    of = f" of stage {busiest.stage}, which sends most" if len(estimate.stages) > 1 else ""
    wire += f"; copied to and from its host: {human_bytes(pcie)}" if pcie else ""
    return f"Sent in a step by a GPU{of}: {wire}\n{text_table(rows, '<<<>>>', flexible=[2])}"
