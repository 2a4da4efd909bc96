"""What the page asks of memplan, as plain values of JSON.

A *question* is a plan as a link to the page has it: texts by the names of the command line's flags. Answers
come in two parts: `answer` has all that a record says and takes milliseconds; `held` adds the allocator's
replay, on which the verdict may hang.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from time import perf_counter
from typing import Any, Final

from memplan.checks import divisors
from memplan.command import estimate_command, plan_values
from memplan.comparison import compare
from memplan.engines.base import ENGINES
from memplan.engines.options import USUAL_ENGINE, option_fields, plan_dict, plan_fields
from memplan.errors import InvalidValue, MemplanError, unknown_name
from memplan.estimate import Estimate, estimate
from memplan.fields import Choice, Count, Field, Flag, Number, Registered
from memplan.hardware import CLUSTER_FIELDS, gpu, gpu_names, resolve_cluster
from memplan.launchers import exported, targets
from memplan.mesh import VIEWS, axis_names
from memplan.models import parameter_count, preset, preset_names, resolve
from memplan.models.families import IMPLEMENTATION, implementations_of
from memplan.plan import FIELDS, GROUPS, Plan
from memplan.shapes import KINDS
from memplan.tables import (
    batch_text,
    cluster_text,
    disagreement,
    estimate_text,
    finding,
    layers_text,
    ledger_rows,
    trust_text,
    verdict_text,
)
from memplan.timetable import timetable
from memplan.version import version
from memplan.web.searching import VARIED, Searching
from memplan.web.timeline import timeline

Question = Mapping[str, str]
"""A plan as texts by name."""

Answer = dict[str, Any]
"""Plain values."""

EXAMPLE: Final[Question] = {
    "model": "llama-3-70b",
    "cluster": "64xh100-sxm",
    "tp": "8",
    "pp": "4",
    "zero": "1",
    "sequence_parallel": "true",
    "recompute": "full",
    "global_batch": "512",
}
"""The plan that the page opens with."""

SCHEDULE_ROUNDS: Final = 2, 4
"""The least and the most micro-batches for each stage in the picture of a schedule."""

BETWEEN_S: Final = 0.15
"""Seconds between two answers of a search."""

MOST_SHOWN: Final = 48
"""Micro-batches in a picture, unless the pipeline has more stages."""


LAST_STOP: Final = 8
"""The largest number of which all smaller ones are stops of a slider."""


# --- The form ---------------------------------------------------------------------------------------------


def form() -> Answer:
    """What the page is made of before any plan: names, and every field with its description."""
    return {
        "version": version(),
        "models": [{"name": name, "parameters": parameter_count(preset(name))} for name in preset_names()],
        "gpus": [{"name": name, "usable_bytes": gpu(name).usable_bytes} for name in gpu_names()],
        "kinds": list(KINDS),
        "about": [
            _described(name, field, None)
            for name, field in {"implementation": IMPLEMENTATION, **CLUSTER_FIELDS}.items()
        ],
        "groups": [
            {
                "title": title,
                "fields": [_described(name, plan_fields()[name], _usual(name)) for name in names],
            }
            for title, names in GROUPS.items()
        ],
        "varied": list(VARIED),
        "engines": {engine: list(_options(engine)) for engine in ENGINES.names()},
        "example": dict(EXAMPLE),
    }


def _usual(name: str) -> Any:
    return Plan.__dataclass_fields__[name].default


def _options(engine: str) -> Iterator[Answer]:
    kind = ENGINES.named(engine).options
    for name, field in option_fields(engine).items():
        yield _described(name, field, kind.__dataclass_fields__[name].default if kind else None)


def _described(name: str, field: Field, usual: Any) -> Answer:
    """A field as the page shows it: its kind of input, its text, and its value if it is left out."""
    told = usual is not None and not field.left_out
    said: Answer = {"name": name, "help": field.help, "usual": _text(usual) if told else ""}
    match field:
        case Flag(optional=True):
            return said | {"kind": "choice", "choices": ["true", "false"]}
        case Flag():
            return said | {"kind": "flag"}
        case Choice() | Registered():
            return said | {"kind": "choice", "choices": list(field.choices)}
        case Count():
            return said | {"kind": "count", "least": field.least, "most": field.most}
        case Number():
            return said | {"kind": "number"}
    return said | (
        {"kind": "choice", "choices": list(ENGINES.names())} if name == "engine" else {"kind": "text"}
    )


def _text(value: Any) -> str:
    """A value as a question has it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


# --- A question -------------------------------------------------------------------------------------------


def asked(question: Question) -> dict[str, Any]:
    """The arguments of `memplan.estimate` that a question's texts mean.

    Raises:
        MemplanError: a name that is no field of a plan; values are checked by `memplan.estimate`.
    """
    engine = question.get("engine", USUAL_ENGINE)
    known = {"implementation": IMPLEMENTATION, **CLUSTER_FIELDS, **plan_fields(engine)}
    found: dict[str, Any] = {}
    for name, text in question.items():
        if name in ("model", "cluster"):
            found[name] = text
        elif name in known:
            found[name] = known[name].parsed(text)
        else:
            raise unknown_name("option of a plan", name, known)
    return found


@lru_cache(maxsize=8)
def _estimate(question: tuple[tuple[str, str], ...]) -> Estimate:
    return estimate(**{"model": ""} | asked(dict(question)))


def _of(question: Question) -> Estimate:
    return _estimate(tuple(question.items()))


def keep(name: str, text: str) -> Answer:
    """Writes a file that was dropped on the page where a question's `model` finds it.

    Raises:
        InvalidValue: a file that is no config.json and no trace by its name.
    """
    found = os.path.basename(name)
    if not found.endswith(".json"):
        raise InvalidValue(
            f"{name} is no .json; drop a model's config.json, or a trace that memplan.trace saved."
        )
    with open(found, "w", encoding="utf-8") as file:
        file.write(text)
    _estimate.cache_clear()
    return {"model": found}


# --- Answers ----------------------------------------------------------------------------------------------


def answer(question: Question) -> Answer:
    """What a plan's record says: bytes, times, traffic, notes, what to run; all but the allocator's part."""
    found = _of(question)
    cluster, times, time = found.cluster, found.stage_times, found.time
    return {
        "model": {
            "name": found.model.name,
            "parameters": found.n_parameters,
            "layers": found.model.n_blocks,
            "code": found.engine.code or found.model.code,
            "implementation": found.model.implementation,
            "implementations": list(implementations_of(found.model)),
        },
        "plan": {name: _text(value) for name, value in plan_dict(found.plan).items() if value is not None},
        "mesh": str(found.plan.mesh),
        "batch": batch_text(found.plan),
        "cluster": None if cluster is None else {**cluster.to_dict(), "text": cluster_text(cluster)},
        "peak_bytes": found.worst.peak_bytes,
        "worst": found.worst.stage,
        "when": found.worst.when,
        "stages": [
            {
                "stage": stage.stage,
                "layers": layers_text(stage.layers),
                "when": stage.when,
                "bytes": {kind: stage.peak.of(kind) for kind in KINDS},
                "total_bytes": stage.peak_bytes,
                "time": None if times is None else times[i].parts,
            }
            for i, stage in enumerate(found.stages)
        ],
        "needs_replay": _needs_replay(found),
        "verdict": None if _needs_replay(found) else found.verdict,
        "step_s": found.step_s,
        "time": None if time is None else time.parts,
        "time_missing": list(found.time_missing),
        "time_label": found.time_model.label,
        "tokens_per_s": found.tokens_per_s,
        "tokens_per_s_band": found.tokens_per_s_band,
        "mfu": found.mfu,
        "collectives": [c.to_dict() for c in found.collectives],
        "busiest": found.busiest.stage,
        "sent_bytes": found.busiest.sent_bytes,
        "host_bytes": found.host.total_bytes,
        "notes": list(found.notes),
        "trust": trust_text(found),
        "command": estimate_command(found, question.get("model")),
        "targets": list(targets(found)),
    }


def _needs_replay(found: Estimate) -> bool:
    """Whether the verdict hangs on what the allocator reserves."""
    limited = found.cluster is not None and found.cluster.gpu.usable_bytes is not None
    return limited and found.device.has_rules and not found.engine.is_accounting and not found.over_bytes


def stops(question: Question) -> Answer:
    """The values at which a slider of each count stops: for an axis of the mesh what divides the GPUs."""
    known = asked(question)
    where = resolve_cluster(known.get("cluster"))
    n_gpus = 1 if where is None else where.n_gpus
    return dict(_stops(n_gpus, known.get("engine", USUAL_ENGINE)))


def _stops(n_gpus: int, engine: str) -> Iterator[tuple[str, list[int]]]:
    for name, field in plan_fields(engine).items():
        if isinstance(field, Count):
            if name in (*axis_names(), *VIEWS):
                yield name, list(divisors(n_gpus))
            elif name == "global_batch":
                yield name, [*divisors(n_gpus), *(n_gpus * 2**i for i in range(1, 12))]
            elif name == "seq_len":
                yield name, [2**i for i in range(7, 18)]
            elif field.most > LAST_STOP:
                yield name, [2**i for i in range(9)]
            else:
                yield name, list(range(field.least, field.most + 1))


def held(question: Question) -> Answer:
    """What a GPU holds with the allocator's part, and the verdict on it."""
    found = _of(question)
    interval = found.device_bytes
    return {
        "verdict": found.verdict,
        "device_bytes": None if interval is None else list(interval),
        "finding": finding(found),
        "reason": verdict_text(found),
    }


def others(question: Question) -> Answer:
    """The other implementations of the model whose verdict is another one, each in a sentence."""
    return {"disagreement": disagreement(_of(question))}


def text(question: Question) -> Answer:
    """What `memplan estimate --details` prints."""
    return {"text": estimate_text(_of(question), question.get("model"), details=True)}


def ledger(question: Question) -> Answer:
    """Every named tensor at the worst instant, the largest first."""
    found = _of(question)
    return {"stage": found.worst.stage, "when": found.worst.when, "rows": ledger_rows(found.worst.alive)}


def schedule(question: Question) -> Answer:
    """Every pass of every pipeline rank, of the first micro-batches."""
    found = _of(question)
    plan = found.plan
    least, most = (rounds * plan.n_stages for rounds in SCHEDULE_ROUNDS)
    shown = min(plan.n_micro_batches, max(least, min(most, MOST_SHOWN)))
    if shown < plan.n_micro_batches:
        found = _of({**question, "global_batch": str(plan.batch_of(shown))})
    passes = [(p.rank, p.stage, p.part, p.micro_batch, p.start_s, p.stop_s) for p in timetable(found)]
    return {"passes": passes, "shown": shown, "n_micro_batches": plan.n_micro_batches}


def step(question: Question) -> Answer:
    """The bytes of the stage that holds most over a step, by kind."""
    of = _of(question).worst
    return {"phases": [phase._asdict() for phase in timeline(of)], "stage": of.stage}


def export(question: Question, to: str) -> Answer:
    """The file that tells a launcher the plan."""
    found = exported(_of(question), to, question.get("model"))
    return {"text": found.text, "file": found.file, "notes": list(found.notes)}


def compared(a: Question, b: Question) -> Answer:
    """Which of two plans of a job is better, and what makes the difference."""
    return {"text": compare(_of(a), _of(b))}


CALLS: Final[Mapping[str, Callable[..., Answer]]] = {
    each.__name__: each
    for each in (form, keep, stops, answer, held, others, text, ledger, schedule, step, export, compared)
}
"""What the page may call, by name."""


# --- A search ---------------------------------------------------------------------------------------------


def search(question: Question, varied: Sequence[str]) -> Iterator[Answer]:
    """The best plans that differ from a question in these fields, and how far the search for them is.

    Yields what has been found some times a second, and when all is.

    Raises:
        MemplanError: no cluster, a value that is not allowed, or too many plans.
    """
    under_way = _searching(question, varied)
    plans = under_way.checked()
    n_plans, shown_s = sum(map(len, plans)), perf_counter()
    yield _found(question, under_way, n_plans, done=False)
    for _ in under_way.run(plans):
        if perf_counter() - shown_s > BETWEEN_S:
            yield _found(question, under_way, n_plans, done=False)
            shown_s = perf_counter()
    yield _found(question, under_way, n_plans, done=True)


def _searching(question: Question, varied: Sequence[str]) -> Searching:
    known = asked(question)
    changes: Any = {name: known.pop(name, None) for name in CLUSTER_FIELDS}
    cluster = resolve_cluster(known.pop("cluster", None), **changes)
    if cluster is None:
        raise InvalidValue("No GPU is named to search for; choose one, as in 64xh100-sxm.")
    device = cluster.gpu.device.type
    model = resolve(known.pop("model", ""), known.pop("implementation", None), device)
    usual = {"global_batch": cluster.n_gpus, "seq_len": model.usual_seq_len}
    kept = {name: value for name, value in (usual | known).items() if name not in ("dp", *varied)}
    kept["global_batch"] = FIELDS["global_batch"].checked("global_batch", kept["global_batch"])
    return Searching(model=model, cluster=cluster, kept=kept, varied=tuple(varied))


def _found(question: Question, under_way: Searching, n_plans: int, *, done: bool) -> Answer:
    return {
        "n_plans": n_plans,
        "n_seen": under_way.n_seen,
        "n_within": under_way.n_within,
        "n_beyond": under_way.n_beyond,
        "n_refused": under_way.n_refused,
        "done": done,
        "best": [_ranked(question, ranked.estimate) for ranked in under_way.best],
    }


def _ranked(question: Question, found: Estimate) -> Answer:
    """A plan of a search: the question that it answers, and its figures."""
    values = {name: value for name, value in plan_values(found.plan).items() if name != "dp"}
    about = {name: text for name, text in question.items() if name not in plan_fields(found.plan.engine)}
    return {
        "question": about | {name: _text(value) for name, value in values.items()},
        "mesh": str(found.plan.mesh),
        "values": {name: _text(getattr(found.plan, name)) for name in VARIED},
        "peak_bytes": found.worst.peak_bytes,
        "step_s": found.step_s,
        "tokens_per_s_per_gpu": found.tokens_per_s_per_gpu,
    }


def call(name: str, *arguments: Any) -> Answer:
    """The answer to a call of the page: the value, or the sentence that refuses it."""
    try:
        return {"value": CALLS[name](*arguments)}
    except MemplanError as error:
        return {"error": str(error)}


def stream(*arguments: Any) -> Iterator[Answer]:
    """The answers of a search as `call` gives one."""
    try:
        for found in search(*arguments):
            yield {"value": found}
    except MemplanError as error:
        yield {"error": str(error)}
