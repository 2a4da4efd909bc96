"""Estimates as tables: text for a terminal of 80 columns, and pandas frames.

Text needs nothing but this module; frames need pandas, which is imported when one is made.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final, cast

from memplan.engines.options import not_usual
from memplan.estimate import Estimate, StageEstimate
from memplan.hardware import Cluster
from memplan.plan import MESH_AXES, Plan
from memplan.shapes import KINDS, Buffer
from memplan.text_tables import frame, interval_text, margin_text, printable, text_table, wrapped
from memplan.units import binary_unit, human_bytes, scaled, time_unit

if TYPE_CHECKING:
    import pandas

MOST_STAGES: Final = 24
"""The most pipeline stages that are printed; of more only the first, the last and the worst."""

BRIEF_KINDS: Final = dict(zip(KINDS, ("weights", "grads", "optim.", "activ.", "temp."), strict=True))

LEDGER_COLUMNS: Final = ("name", "kind", "shape", "dtype", "count", "each_bytes", "total_bytes")

CONFIRMED: Final = {
    "measured": "CPU rules, confirmed by real runs: python -m validate compares them.",
    "unmeasured": "CUDA rules, confirmed by PyTorch's CUDA software without a GPU;\n"
    "no GPU run has confirmed them yet.",
    "unconfirmed": "No run has confirmed these rules.",
}
DEVICES: Final = {"cuda": "CUDA rules", "cpu": "the CPU's rules, as `python -m validate` measures them"}

HEADED: Final = (
    *MESH_AXES,
    "zero",
    "sequence_parallel",
    "schedule",
    "micro_batch",
    "global_batch",
    "seq_len",
)
"""The fields of a plan in the lines "mesh" and "batch"."""

ALWAYS: Final = ("precision", "optimizer", "recompute", "engine")
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


def estimate_text(estimate: Estimate) -> str:
    """The text of `print(estimate)`: the plan, each stage's peak, the verdict, the traffic.

    Every line has at most `WIDTH` characters; every number of bytes has its unit.
    """
    parts = [_header(estimate), _stages(estimate), _verdict(estimate), _host(estimate)]
    parts += [_collectives(estimate), _time(estimate), *notes_text({"": estimate})]
    parts.append(estimate.engine.assumes or CONFIRMED[estimate.confirmed])
    return "\n\n".join(part for part in parts if part)


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
    cells = [("kind", "name", "type", "shape", "count", "total")]
    for row in rows:
        shape = "x".join(map(str, row["shape"])) or "scalar"
        total = human_bytes(row["total_bytes"])
        cells.append((BRIEF_KINDS[row["kind"]], row["name"], row["dtype"], shape, f"{row['count']:,}", total))
    total_bytes = sum(row["total_bytes"] for row in rows)
    return (
        f"{text_table(cells, '<<<<>>', flexible=[1])}\n\n{human_bytes(total_bytes)} = {total_bytes:,} bytes"
    )


def _header(estimate: Estimate) -> str:
    model, plan, cluster = estimate.model, estimate.plan, estimate.cluster
    if cluster is None:
        place = f"none given: {DEVICES[estimate.device.type]}, no limit"
    else:
        place = f"{printable(cluster.name)}: {cluster_text(cluster)}"
    how = f"zero={plan.zero}" + (", sequence_parallel" if plan.sequence_parallel else "")
    how += f", schedule={plan.schedule}" if plan.pp > 1 else ""
    options = {name: getattr(plan, name) for name in ALWAYS} | not_usual(plan)
    layers = f"{model.n_blocks} layers" if model.n_blocks else "no repeated blocks"
    lines = {
        "model": f"{printable(model.name)}: {estimate.n_parameters:,} parameters, {layers}",
        "code": f"{model.implementation}: {model.code}",
        "cluster": place,
        "mesh": f"{plan.mesh_text}, {how}",
        "batch": batch_text(plan),
        "options": ", ".join([f"{name}={value}" for name, value in options.items() if name not in HEADED]),
    }
    return "\n".join(wrapped(f"{label:<9}{line}", indent=" " * 9) for label, line in lines.items())


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
    unit, name = binary_unit(estimate.peak.total_bytes)
    digits = 2 if estimate.peak.total_bytes < 100 * unit else 1
    rows: list[tuple[str, ...]] = [("stage", "layers", *BRIEF_KINDS.values(), "total", "worst in")]
    expected = 0
    for stage in _stages_shown(estimate):
        if stage.stage > expected:
            rows.append(("...",) * len(rows[0]))
        expected = stage.stage + 1
        numbers = [scaled(n_bytes, unit, digits) for n_bytes in stage.peak.to_dict().values()]
        instant = _brief(stage.when.split(",")[0].replace(":", ""))
        rows.append((str(stage.stage), layers_text(stage.layers), *numbers, instant))
    title = "Worst instant of " + ("each stage" if len(rows) > 2 else "a step")
    return f"{title}, {name} on the GPU that holds most\n{text_table(rows, '><>>>>>><', flexible=[8])}"


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
    if held is None:
        return "No verdict: CPU ranks have no limit."
    holds = f"a GPU holds {interval_text(held)} (CUDA's context and NCCL's buffers included)"
    if cluster is None or verdict is None:
        return (
            f"No verdict: {'no cluster was given' if cluster is None else 'the GPU has no limit'}; {holds}."
        )
    usable_bytes, budget_bytes = cluster.gpu.usable_bytes or 0, cluster.budget_bytes or 0
    usable = f"{human_bytes(usable_bytes)} usable, {margin_text(cluster.margin)}"
    if verdict == "fits":
        gives_back = " To keep within, the allocator gives back cached blocks, which takes time."
        back = gives_back if estimate.gives_back else ""
        return f"FITS: {holds}; up to {human_bytes(budget_bytes)} fit ({usable}).{back}"
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
    parts = [
        f"{part.removesuffix('_s')} {scaled(s, unit, 2)}" for part, s in time.parts.items() if s >= unit / 200
    ]
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
    rows = [("collective", "axis", "what", "calls", "payload", "wire")]
    for c in calls:
        n_bytes = human_bytes(c.payload_bytes), human_bytes(c.wire_bytes)
        rows.append((c.kind, c.axis, _brief(c.what), f"{c.calls:,}", *n_bytes))
    wire = human_bytes(busiest.sent_bytes)
    pcie = sum(c.wire_bytes for c in calls if c.axis == "host")
    of = f" of stage {busiest.stage}, which sends most" if len(estimate.stages) > 1 else ""
    wire += f"; copied to and from its host: {human_bytes(pcie)}" if pcie else ""
    return f"Sent in a step by a GPU{of}: {wire}\n{text_table(rows, '<<<>>>', flexible=[2])}"
