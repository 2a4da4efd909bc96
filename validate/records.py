"""One record per case: what was asked, predicted and measured, and the verdict; kept as JSON lines."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

from memplan.errors import InvalidValue

Outcome = Literal["ok", "refused", "crashed", "timed-out", "out-of-memory", "wrong-loss"]

PEAK_TOLERANCE: Final = 0.01
"""The largest error of a predicted peak that counts as right, as a fraction of the measured one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A case and what came of it.

    `peak_error` is prediction / measurement - 1 of the rank where it is largest, `states_off_bytes` the sum
    over ranks of the absolute differences of weights, gradients and optimizer state, `collectives_off` the
    number of entries (rank, kind, axis, calls, payload) on one side only, `loss_error` and
    `gradient_error` the largest relative differences of any step's loss, and of the first gradient's norm,
    from the single-process run. None: not known, for `reason`.
    """

    case: dict[str, Any]
    outcome: Outcome
    reason: str = ""
    predicted: dict[str, Any] | None = None
    measured: dict[str, Any] | None = None
    peak_error: float | None = None
    states_off_bytes: int | None = None
    collectives_off: int | None = None
    loss_error: float | None = None
    gradient_error: float | None = None

    @property
    def confirmed(self) -> bool:
        """Whether the run confirms the prediction: states and collectives exactly, the peak within 1 %."""
        return (
            self.outcome == "ok"
            and self.states_off_bytes == 0
            and self.collectives_off == 0
            and self.peak_error is not None
            and abs(self.peak_error) <= PEAK_TOLERANCE
        )

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self), allow_nan=False)


def read_records(path: Path) -> list[Record]:
    """The records of a file.

    Raises:
        InvalidValue: a line that is no record, with its number.
    """
    records = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            records.append(Record(**json.loads(line)))
        except (TypeError, json.JSONDecodeError) as error:
            raise InvalidValue(
                f"{path}, line {number} is not a record of validate ({error}); "
                "use a file that `sweep --out` wrote."
            ) from None
    return records


def append_records(path: Path, records: Iterable[Record]) -> None:
    """Adds records to a file, one line each, creating it and its folder if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(record.to_json() + "\n" for record in records)
