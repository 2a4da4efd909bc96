"""Estimates as tables: text for a terminal of 80 columns, and pandas frames.

Text needs nothing but this module; frames need pandas, which is imported when one is made.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import repeat
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Final, cast

from memplan.estimate import Estimate, StageEstimate
from memplan.layout import WIDTH, cut, frame, printable, text_table
from memplan.plan import Plan
from memplan.shapes import KINDS, Buffer
from memplan.units import binary_unit, human_bytes, scaled, time_unit

if TYPE_CHECKING:
    import pandas

MOST_STAGES: Final = 24
"""Pipeline stages printed; of more, the first, the last and the worst are."""

BRIEF_KINDS: Final = dict(zip(KINDS, ("weights", "grads", "optim.", "activ.", "temp."), strict=True))

LEDGER_COLUMNS: Final = ("name", "kind", "shape", "dtype", "count", "each_bytes", "total_bytes")

CONFIRMED: Final = {
    "measured": "CPU rules, confirmed by real runs: python -m validate compares them.",
    "unmeasured": "CUDA rules are read from sources; no GPU run has confirmed them yet.",
}
TEXTBOOK: Final = (
    "The papers' closed forms (dropout, d_ff = 4 d_model, attention scores kept,\n"
    "16-bit activations; no buffers): for teaching and for checking formulas."
)

# --- Frames -----------------------------------------------------------------------------------------------


def ledger_rows(alive: Mapping[Buffer, int]) -> list[dict[str, Any]]:
    """What is alive, as plain rows, largest first; their `total_bytes` add up to all of it.

    Buffers alike in name, kind, shape, type and size are one row.

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
    """One row per pipeline stage: its layers, its peak by kind in bytes, when that is, its step, the batch.

    Raises:
        MemplanError: if pandas is not installed.
    """
    rows = [
        {
            "stage": s.stage,
            "layers": layers_text(s.layers),
            "n_layers": sum(map(len, s.layers)),
            **s.peak.to_dict(),
        }
        | {"rest_bytes": s.rest_bytes, "when": s.when}
        | {"step_s": None if time is None else time.total_s}
        | {
            "global_batch": estimate.plan.global_batch,
            "micro_batch": estimate.plan.micro_batch,
            "n_micro_batches": estimate.plan.n_micro_batches,
        }
        for s, time in zip(estimate.stages, estimate.stage_times or repeat(None), strict=False)
    ]
    return frame(rows, tuple(rows[0]))


def collectives_frame(estimate: Estimate) -> "pandas.DataFrame":
    """One row per stage, kind, mesh axis and purpose: calls, payload and wire bytes of one rank's step.

    Raises:
        MemplanError: if pandas is not installed.
    """
    columns = ("stage", "kind", "axis", "what", "calls", "payload_bytes", "wire_bytes", "overlappable")
    rows = [{"stage": s.stage} | asdict(c) for s in estimate.stages for c in s.collectives]
    return frame(rows, columns)


def instants_frame(estimate: Estimate) -> "pandas.DataFrame":
    """One row per stage and stretch of its step: the most bytes held in it, in the order of the step.

    Raises:
        MemplanError: if pandas is not installed.
    """
    rows = [{"stage": s.stage} | asdict(i) for s in estimate.stages for i in s.instants]
    return frame(rows, ("stage", "when", "total_bytes"))


# --- Text -------------------------------------------------------------------------------------------------


def estimate_text(estimate: Estimate) -> str:
    """What `print(estimate)` shows: what was asked, each stage's peak, whether it fits, what is sent.

    Every line has at most `WIDTH` characters; whatever stands for bytes says its unit.
    """
    textbook = estimate.plan.engine == "textbook"
    parts = [_header(estimate), _stages(estimate), _verdict(estimate), _host(estimate)]
    parts += [_collectives(estimate), _time(estimate)]
    parts.append(TEXTBOOK if textbook else CONFIRMED[estimate.confirmed])
    return "\n\n".join(part for part in parts if part)


def ledger_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """A ledger for a terminal, its sum below it."""
    cells = [("kind", "name", "type", "shape", "count", "total")]
    for row in rows:
        shape = "x".join(map(str, row["shape"])) or "scalar"
        total = human_bytes(row["total_bytes"])
        cells.append((BRIEF_KINDS[row["kind"]], row["name"], row["dtype"], shape, f"{row['count']:,}", total))
    total_bytes = sum(row["total_bytes"] for row in rows)
    return f"{text_table(cells, '<<<<>>', flexible=1)}\n\n{human_bytes(total_bytes)} = {total_bytes:,} bytes"


def _header(estimate: Estimate) -> str:
    model, plan, cluster = estimate.model, estimate.plan, estimate.cluster
    if cluster is None:
        place = "none given: CUDA rules, no limit"
    else:
        place = f"{printable(cluster.name)}: {_nodes(cluster.n_nodes, cluster.gpus_per_node)}"
    how = f"zero={plan.zero}" + (", sequence_parallel" if plan.sequence_parallel else "")
    how += f", schedule={plan.schedule}" if plan.pp > 1 else ""
    how += f", fsdp_units={plan.fsdp_units}" if plan.fsdp_units != "block" else ""
    how += f", fsdp_blocks={plan.fsdp_blocks}" if plan.fsdp_blocks > 1 else ""
    how += ", offload" if plan.offload else ""
    lines = {
        "model": f"{printable(model.name)}: {estimate.n_parameters:,} parameters, {model.n_layers} layers",
        "cluster": place,
        "mesh": f"{plan.mesh_text}, {how}",
        "batch": f"{plan.global_batch} x {plan.seq_len} tokens; micro-batches of {plan.micro_batch}: "
        f"{plan.n_micro_batches} per replica",
        "kept as": f"{plan.precision}, {plan.optimizer}, recompute={plan.recompute}, engine={plan.engine}",
    }
    update = f", {plan.optimizer_impl}" if plan.optimizer_impl != "default" else ""
    update += f", clip_grad_norm={plan.clip_grad_norm:g}" if plan.clip_grad_norm is not None else ""
    update += "" if plan.set_to_none else ", set_to_none=False"
    if ddp := _ddp_options(plan):
        lines["ddp"] = ddp
    if plan.loss_chunks > 1:
        lines["loss"] = f"cross-entropy over {plan.loss_chunks} chunks of the sequence"
    if update:
        lines["update"] = f"{plan.optimizer}{update}"
    return "\n".join(cut(f"{label:<9}{line}", WIDTH) for label, line in lines.items())


def _ddp_options(plan: Plan) -> str:
    """What DDP does otherwise than by default.

    >>> _ddp_options(Plan(dp=2, static_graph=True, ddp_comm_hook="fp16", bucket_cap_bytes=2**20))
    'static_graph, buckets of 1.00 MiB, hook fp16'
    """
    options = [name for name in ("gradient_as_bucket_view", "static_graph") if getattr(plan, name)]
    if plan.bucket_cap_bytes is not None:
        options.append(f"buckets of {human_bytes(plan.bucket_cap_bytes)}")
    if plan.ddp_comm_hook != "none":
        options.append(f"hook {plan.ddp_comm_hook}")
    return ", ".join(options)


def _nodes(n_nodes: int, gpus_per_node: int) -> str:
    return f"{n_nodes} node{'s' * (n_nodes > 1)} of {gpus_per_node}"


def _stages(estimate: Estimate) -> str:
    unit, name = binary_unit(estimate.peak.total_bytes)
    digits = 2 if estimate.peak.total_bytes < 100 * unit else 1
    rows: list[tuple[str, ...]] = [("stage", "layers", *BRIEF_KINDS.values(), "total", "worst in")]
    expected = 0
    for stage in _stages_shown(estimate):
        if stage.stage > expected:
            rows.append(("...",) * len(rows[0]))
        expected = stage.stage + 1
        kinds = (getattr(stage.peak, f"{kind}_bytes") for kind in (*KINDS, "total"))
        rows.append(_stage_row(stage, [scaled(n_bytes, unit, digits) for n_bytes in kinds]))
    title = "Worst instant of " + ("each stage" if len(rows) > 2 else "a step")
    return f"{title}, {name} on the GPU that holds most\n{text_table(rows, '><>>>>>><', flexible=8)}"


def _stages_shown(estimate: Estimate) -> list[StageEstimate]:
    stages = estimate.stages
    if len(stages) <= MOST_STAGES:
        return list(stages)
    ends = MOST_STAGES // 3
    shown = {*range(ends), estimate.worst.stage, *range(len(stages) - ends, len(stages))}
    return [stages[i] for i in sorted(shown)]


def _stage_row(stage: StageEstimate, numbers: list[str]) -> tuple[str, ...]:
    return (
        str(stage.stage),
        layers_text(stage.layers),
        *numbers,
        _brief(stage.when.split(",")[0].replace(":", "")),
    )


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
    peak = f"Peak {human_bytes(estimate.peak.total_bytes)}: {where}{estimate.worst.when}."
    return "\n".join(cut(line, WIDTH) for line in (peak, _fits(estimate), *_on_device(estimate)))


def _fits(estimate: Estimate) -> str:
    cluster = estimate.cluster
    budget_bytes = cluster.budget_bytes if cluster is not None else None
    if estimate.plan.engine == "textbook":
        return "No verdict: textbook accounting is never one on whether a plan fits."
    if cluster is None or budget_bytes is None:
        return "No verdict: " + ("no cluster was given." if cluster is None else "CPU ranks have no limit.")
    left_bytes = budget_bytes - estimate.peak.total_bytes
    usable = human_bytes(cluster.gpu.usable_bytes or 0)
    budget = f"{human_bytes(budget_bytes)} ({usable} less {cluster.margin:.0%})"
    if left_bytes >= 0:
        return f"FITS: {human_bytes(left_bytes)} of {budget} are left."
    return f"DOES NOT FIT: {human_bytes(-left_bytes)} more than {budget}."


def _on_device(estimate: Estimate) -> list[str]:
    """What the caching allocator makes of the peak, and the process of that."""
    reserved_bytes, held = estimate.reserved_bytes, estimate.device_bytes
    if reserved_bytes is None or held is None:
        return []
    ends = f"{human_bytes(held.low_bytes)} to {human_bytes(held.high_bytes)}"
    verdict = "" if estimate.verdict is None else f": {estimate.verdict}"
    return [
        f"Reserved by the caching allocator: {human_bytes(reserved_bytes)}.",
        f"On the GPU with CUDA's context and NCCL's buffers: {ends}{verdict}.",
    ]


def _host(estimate: Estimate) -> str:
    held = estimate.host
    if not held.total_bytes:
        return ""
    unit, name = binary_unit(held.total_bytes)
    kinds = {kind: getattr(held, f"{kind}_bytes") for kind in KINDS}
    parts = ", ".join(f"{BRIEF_KINDS[kind]} {scaled(n, unit, 2)}" for kind, n in kinds.items() if n)
    pinned = human_bytes(max(stage.host_pinned_bytes for stage in estimate.stages))
    total = f"Host {human_bytes(held.total_bytes)} for each GPU, {pinned} of it page-locked: {name} of"
    return "\n".join(cut(line, WIDTH) for line in (total, parts))


def _time(estimate: Estimate) -> str:
    """The step's seconds, and the parts of them that are not 0."""
    time = estimate.time
    if time is None:
        return "\n".join(wrap(f"No step time: {'; '.join(estimate.time_missing)}.", WIDTH))
    unit, name = time_unit(time.total_s)
    rate, each = estimate.tokens_per_s or 0.0, estimate.tokens_per_s_per_gpu or 0.0
    total = f"Step {scaled(time.total_s, unit, 2)} {name}: {_rate(rate)} tokens/s, {_rate(each)} per GPU, "
    total += f"MFU {estimate.mfu or 0.0:.1%}"
    parts = [
        f"{part.removesuffix('_s')} {scaled(s, unit, 2)}" for part, s in time.parts.items() if s >= unit / 200
    ]
    lines = [total, *wrap(f"= {' + '.join(parts)}", WIDTH), *wrap(estimate.time_model.label, WIDTH)]
    return "\n".join(lines)


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
    rows = [("collective", "axis", "what", "calls", "payload", "wire")]
    for c in calls:
        n_bytes = human_bytes(c.payload_bytes), human_bytes(c.wire_bytes)
        rows.append((c.kind, c.axis, _brief(c.what), f"{c.calls:,}", *n_bytes))
    wire = human_bytes(busiest.sent_bytes)
    pcie = sum(c.wire_bytes for c in calls if c.axis == "host")
    of = f" of stage {busiest.stage}, which sends most" if len(estimate.stages) > 1 else ""
    wire += f"; copied to and from its host: {human_bytes(pcie)}" if pcie else ""
    return f"Sent in a step by a GPU{of}: {wire}\n{text_table(rows, '<<<>>>', flexible=2)}"
