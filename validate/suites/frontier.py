"""The largest training that runs within a limit, along one axis: predicted, then found by running it.

A try is a case like any other, kept in the same file, so that a search that was stopped goes on from what its
file has. What a rank may hold is limited (on a GPU CUDA's allocator keeps to it; on CPU, whose allocator does
not, a larger peak counts as out of memory), so that the answer depends on nothing else that is on the device.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any, Final, Literal

from memplan import Gpt, Llama, Plan
from memplan.allocator import OutOfMemory
from memplan.engines.options import plan_of
from memplan.models import Decoder
from memplan.units import GiB, MiB, human_bytes
from validate.cases import Case, title
from validate.gpus import Gpus
from validate.predict import estimated_rank
from validate.records import Record
from validate.suites.gpu import GPT2, LLAMA_1B, LLAMA_100M, in_short, smallest

STEPS: Final = 5
"""Of a try on a GPU: three to warm up, one observed, one timed."""

Along = Literal["micro-batch", "sequence", "layers"]
"""What grows: sequences in a micro-batch, tokens of a sequence, layers of the model."""

TOKENS: Final = 128
"""Tokens that a sequence grows by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """How large this training may be along an axis if each rank's allocator may hold `limit_bytes`."""

    model: Decoder
    plan: Plan
    limit_bytes: int
    gpus: Gpus | None
    along: Along = "micro-batch"

    def case(self, n: int) -> Case:
        """The training with `n` sequences in a micro-batch, `n` x 128 tokens in a sequence, or `n` layers."""
        model, plan = self.model, self.plan
        match self.along:
            case "micro-batch":
                plan = replace(plan, micro_batch=n, global_batch=n)
            case "sequence":
                plan = replace(plan, seq_len=n * TOKENS)
            case "layers":
                model = replace(model, n_layers=n)
        layers = f"{n} layers, " if self.along == "layers" else ""
        case = Case(
            name=f"{title(model, plan)}, {layers}{plan.seq_len} tokens in {human_bytes(self.limit_bytes)}",
            model=model,
            plan=plan,
            limit_bytes=self.limit_bytes,
        )
        if self.gpus is None:
            return case
        return replace(case, device=self.gpus.device, gpu=self.gpus.known_as, steps=STEPS)

    def fits(self, n: int) -> bool:
        """Whether it is predicted to run: on a GPU whether the allocator gets along, else by its peak."""
        estimated = estimated_rank(self.case(n), 0)
        if estimated.peak_bytes > self.limit_bytes:
            return False
        try:
            estimated.replay(allowed_bytes=self.limit_bytes)
        except OutOfMemory:
            return False
        return True

    @property
    def most(self) -> int | None:
        """The largest `n` of a case: a sequence is not longer than the model's positions."""
        return self.model.max_seq_len // TOKENS if self.along == "sequence" else None

    @property
    def predicted(self) -> int:
        """The largest `n` that is predicted to fit; 0 if none is."""
        return _predicted(self)


@cache
def _predicted(question: Question) -> int:
    most, beyond = question.most, 1
    while (most is None or beyond <= most) and question.fits(beyond):
        beyond *= 2
    least = beyond // 2
    beyond = beyond if most is None else min(beyond, most + 1)
    while beyond - least > 1:
        half = (least + beyond) // 2
        least, beyond = (half, beyond) if question.fits(half) else (least, half)
    return least


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    """The answer to a question so far: the largest `n` that ran, the smallest that did not.

    `unclear` are outcomes that say nothing about memory, such as a crash: then it stays open.
    """

    question: Question
    predicted: int
    ran: int
    failed: int | None
    unclear: tuple[str, ...]

    @property
    def found(self) -> int | None:
        """The largest `n` that runs; None while that is open."""
        if self.ran and self.ran == self.question.most and not self.unclear:
            return self.ran
        known = self.failed is not None and self.failed <= self.ran + 1 and not self.unclear
        return self.ran if known else None

    @property
    def next_try(self) -> int | None:
        """The `n` to run next: away from the prediction in doubling steps, then halving."""
        if self.found is not None or self.unclear:
            return None
        if self.failed is None and not self.ran:
            return max(1, self.predicted)
        if self.failed is None:
            return min(self.ran + max(1, 2 * (self.ran - self.predicted)), self.question.most or sys.maxsize)
        if not self.ran:
            return max(1, self.failed - max(1, 2 * (self.predicted - self.failed)))
        return (self.ran + self.failed) // 2

    def __str__(self) -> str:
        question, plan = self.question, self.question.plan
        found = " ".join(self.unclear) or "open" if self.found is None else str(self.found)
        tokens = f" of {TOKENS} tokens" if question.along == "sequence" else f", {plan.seq_len} tokens"
        return (
            f"{title(question.model, plan)}{tokens} in {human_bytes(question.limit_bytes)}: "
            f"most {question.along} predicted {self.predicted}, found {found}"
        )


def size(case: Case, along: Along) -> int:
    """The `n` of a case along an axis, as `Question.case` counts."""
    sizes = {
        "micro-batch": case.plan.micro_batch,
        "sequence": case.plan.seq_len // TOKENS,
        "layers": case.model.n_layers,
    }
    return sizes[along]


def frontier(question: Question, records: Iterable[Record]) -> Frontier:
    """What records say about a question."""
    tried: dict[int, str] = {}
    for record in records:
        case = Case.from_dict(record.case)
        n = size(case, question.along)
        if n and case.identity == question.case(n).identity:
            tried[n] = record.outcome
    return Frontier(
        question=question,
        predicted=question.predicted,
        ran=max((n for n, outcome in tried.items() if outcome in ("ok", "wrong-loss")), default=0),
        failed=min((n for n, outcome in tried.items() if outcome == "out-of-memory"), default=None),
        unclear=tuple(o for o in tried.values() if o not in ("ok", "wrong-loss", "out-of-memory")),
    )


ASKED: Final[tuple[tuple[Decoder, dict[str, Any], int], ...]] = (
    (GPT2, {"seq_len": 1024}, 16 * GiB),
    (GPT2, {"seq_len": 1024, "precision": "fp32"}, 16 * GiB),
    (LLAMA_100M, {"seq_len": 2048, "recompute": "full"}, 16 * GiB),
    (LLAMA_100M, {"seq_len": 8192, "precision": "bf16"}, 16 * GiB),
    (LLAMA_1B, {"seq_len": 2048}, 60 * GiB),
    (LLAMA_1B, {"seq_len": 4096, "recompute": "full", "loss_chunks": 8}, 40 * GiB),
)
"""Decoder, plan and how much of a GPU may be held."""

CPU_LIMITS: Final[dict[type[Decoder], int]] = {Gpt: 6 * MiB, Llama: 18 * MiB}
"""How much a rank of the smallest form may hold, by the model's family."""


PRECISIONS: Final = ("fp32", "bf16-mixed", "bf16")
RECOMPUTES: Final = ("none", "selective", "full")
ALONG: Final[tuple[Along, ...]] = ("micro-batch", "sequence", "layers")
WITHOUT_GPU: Final[tuple[tuple[Decoder, dict[str, Any], int], ...]] = (
    (GPT2, {}, 8 * GiB),
    (LLAMA_100M, {}, 12 * GiB),
    (LLAMA_1B, {}, 60 * GiB),
)
"""Asked of every precision and recompute policy, along every axis, of a GPU that is not there."""


def asked(gpus: Gpus | None) -> Iterator[Question]:
    """All questions; in the smallest form without a GPU."""
    for model, options, limit_bytes in ASKED:
        plan = plan_of(**options)
        if gpus is None:
            small = smallest(model)
            yield Question(model=small, plan=in_short(plan), limit_bytes=CPU_LIMITS[type(small)], gpus=None)
        elif limit_bytes < gpus.memory_bytes:
            yield Question(model=model, plan=plan, limit_bytes=limit_bytes, gpus=gpus)
    if gpus is None or gpus.device != "nogpu":
        return
    for (model, options, limit_bytes), precision, recompute in product(WITHOUT_GPU, PRECISIONS, RECOMPUTES):
        plan = plan_of(**options, seq_len=1024, precision=precision, recompute=recompute)
        for along in ALONG:
            yield Question(model=model, plan=plan, limit_bytes=limit_bytes, gpus=gpus, along=along)


def frontiers(gpus: Gpus | None, records: Sequence[Record]) -> list[Frontier]:
    """What records say about every question."""
    return [frontier(question, records) for question in asked(gpus)]


def next_cases(gpus: Gpus | None, records: Sequence[Record]) -> list[Case]:
    """The next try of every question that records leave open."""
    return [
        known.question.case(known.next_try)
        for known in frontiers(gpus, records)
        if known.next_try is not None
    ]
