"""The largest micro-batch that runs: predicted, then found by running it.

A try is a case like any other, kept in the same file, so that a search that was stopped goes on from what its
file has. What a rank may hold is limited (on a GPU CUDA's allocator keeps to it; on CPU, whose allocator does
not, a larger peak counts as out of memory), so that the answer depends on nothing else that is on the device.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from memplan import Gpt, Llama, Model, Plan
from memplan.units import GiB, MiB, human_bytes
from validate.cases import Case, title
from validate.gpus import Gpus
from validate.predict import estimated_rank
from validate.records import Record
from validate.suites.gpu import GPT2, LLAMA_1B, LLAMA_100M, in_short, smallest

STEPS: Final = 5
"""Of a try on a GPU: two to warm up, one counted, one observed, one timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """How large a micro-batch of this training may be if each rank's allocator may hold `limit_bytes`."""

    model: Model
    plan: Plan
    limit_bytes: int
    gpus: Gpus | None

    def case(self, micro_batch: int) -> Case:
        """The training with this micro-batch."""
        plan = replace(self.plan, micro_batch=micro_batch, global_batch=micro_batch)
        case = Case(
            name=f"{title(self.model, plan)}, {plan.seq_len} tokens in {human_bytes(self.limit_bytes)}",
            model=self.model,
            plan=plan,
            limit_bytes=self.limit_bytes,
        )
        if self.gpus is None:
            return case
        return replace(case, device=self.gpus.device, gpu=self.gpus.known_as, steps=STEPS)

    def fits(self, micro_batch: int) -> bool:
        """Whether the predicted peak is within the limit."""
        return estimated_rank(self.case(micro_batch), 0).peak_bytes <= self.limit_bytes

    @property
    def predicted(self) -> int:
        """The largest micro-batch that is predicted to fit; 0 if none is."""
        beyond = 1
        while self.fits(beyond):
            beyond *= 2
        least = beyond // 2
        while beyond - least > 1:
            half = (least + beyond) // 2
            least, beyond = (half, beyond) if self.fits(half) else (least, half)
        return least


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    """What is known of a question: the largest micro-batch that ran, the smallest that did not.

    `unclear` are outcomes that say nothing about memory, such as a crash: then it stays open.
    """

    question: Question
    predicted: int
    ran: int
    failed: int | None
    unclear: tuple[str, ...]

    @property
    def found(self) -> int | None:
        """The largest micro-batch that runs; None while that is open."""
        known = self.failed is not None and self.failed <= self.ran + 1 and not self.unclear
        return self.ran if known else None

    @property
    def next_try(self) -> int | None:
        """The micro-batch to run next: away from the prediction in doubling steps, then halving."""
        if self.found is not None or self.unclear:
            return None
        if self.failed is None and not self.ran:
            return max(1, self.predicted)
        if self.failed is None:
            return self.ran + max(1, 2 * (self.ran - self.predicted))
        if not self.ran:
            return max(1, self.failed - max(1, 2 * (self.predicted - self.failed)))
        return (self.ran + self.failed) // 2

    def __str__(self) -> str:
        plan = self.question.plan
        found = " ".join(self.unclear) or "open" if self.found is None else str(self.found)
        return (
            f"{title(self.question.model, plan)}, {plan.seq_len} tokens in "
            f"{human_bytes(self.question.limit_bytes)}: largest micro-batch predicted {self.predicted}, "
            f"found {found}"
        )


def frontier(question: Question, records: Iterable[Record]) -> Frontier:
    """What records say about a question."""
    tried: dict[int, str] = {}
    for record in records:
        case = Case.from_dict(record.case)
        micro_batch = case.plan.micro_batch
        if case.identity == question.case(micro_batch).identity:
            tried[micro_batch] = record.outcome
    return Frontier(
        question=question,
        predicted=question.predicted,
        ran=max((n for n, outcome in tried.items() if outcome in ("ok", "wrong-loss")), default=0),
        failed=min((n for n, outcome in tried.items() if outcome == "out-of-memory"), default=None),
        unclear=tuple(o for o in tried.values() if o not in ("ok", "wrong-loss", "out-of-memory")),
    )


ASKED: Final[tuple[tuple[Model, dict[str, Any], int], ...]] = (
    (GPT2, {"seq_len": 1024}, 16 * GiB),
    (GPT2, {"seq_len": 1024, "precision": "fp32"}, 16 * GiB),
    (LLAMA_100M, {"seq_len": 2048, "recompute": "full"}, 16 * GiB),
    (LLAMA_100M, {"seq_len": 8192, "precision": "bf16"}, 16 * GiB),
    (LLAMA_1B, {"seq_len": 2048}, 60 * GiB),
    (LLAMA_1B, {"seq_len": 4096, "recompute": "full", "loss_chunks": 8}, 40 * GiB),
)
"""Model, plan and how much of a GPU may be held."""

CPU_LIMITS: Final[dict[type[Model], int]] = {Gpt: 6 * MiB, Llama: 18 * MiB}
"""How much a rank of the smallest form may hold, by the model's family."""


def asked(gpus: Gpus | None) -> Iterator[Question]:
    """All questions; in the smallest form without a GPU."""
    for model, options, limit_bytes in ASKED:
        plan = Plan(**options)
        if gpus is None:
            small = smallest(model)
            yield Question(model=small, plan=in_short(plan), limit_bytes=CPU_LIMITS[type(small)], gpus=None)
        elif limit_bytes < gpus.memory_bytes:
            yield Question(model=model, plan=plan, limit_bytes=limit_bytes, gpus=gpus)


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
