"""Records: a case, its prediction, its measurement and their comparison; kept as JSON lines.

A file may come from anywhere: whatever it holds, it is records as `record.schema.json` says, or refused.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any, Final, Literal

import fastjsonschema

from memplan.checks import checked_count
from memplan.errors import InvalidValue, MemplanError, shown_value
from memplan.files import file_bytes, of_file, shown_path
from validate.cases import Case
from validate.columns import columns, rows
from validate.lines import Lines, open_lines

Outcome = Literal["ok", "refused", "crashed", "timed-out", "out-of-memory", "wrong-loss"]

PEAK_TOLERANCE: Final = 0.01
"""The largest error of a predicted peak that counts as right, as a fraction of the measured one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A case with its outcome and its comparison.

    `peak_error` is prediction / measurement - 1 of the rank where it is largest, `states_off_bytes` the sum
    over ranks of the absolute differences of weights, gradients and optimizer state, `collectives_off` the
    number of entries (rank, kind, axis, calls, payload) on one side only, `loss_error` and
    `gradient_error` the largest relative differences of any step's loss, and of the first gradient's norm,
    from the single-process run. `attributed_fraction` of the bytes at the measured peak are tensors that are
    predicted, on the rank where it is least. None: not known, for `reason`. `anyway` is what came of a
    refused plan that was run all the same, `unchecked` why training that ran was not compared with a
    single-process run.

    What it cost: `setup_s` until the last rank had its module and optimizer, `steps_s` all training steps,
    `overhead_s` what the harness added to both, `cpu_s` all ranks on all cores; `rss_bytes` is the most that
    one rank's process took of the machine. `environment` is what it ran with.
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
    attributed_fraction: float | None = None
    anyway: str = ""
    unchecked: str = ""
    setup_s: float | None = None
    steps_s: float | None = None
    overhead_s: float | None = None
    cpu_s: float | None = None
    rss_bytes: int | None = None
    environment: dict[str, Any] | None = None

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

    @property
    def headline(self) -> str:
        """Why a case did not run, on one line: how a rank's process ended, or the last line of its error."""
        first, *rest = self.reason.strip().splitlines() or [""]
        return first if re.match(r"rank \d+ ", first) or not rest else rest[-1].strip()

    @property
    def fullest_peaks(self) -> tuple[int, int] | None:
        """Predicted and measured peak of the rank that held most; None unless both are known."""
        if self.predicted is None or self.measured is None:
            return None
        ranks = zip(self.predicted["ranks"], self.measured["ranks"], strict=True)
        return max(
            ((ahead["peak_bytes"], seen["peak_bytes"]) for ahead, seen in ranks), key=lambda pair: pair[1]
        )

    def to_json(self) -> str:
        """One line of JSON, as in a file of records: without defaults and `environment`."""
        return _line(self)


def merged(records: Iterable[Record]) -> list[Record]:
    """One record per case: of several the last, at the place of the first.

    Cases are the same if their name, model, plan, seed and steps are.
    """
    return list({Case.from_dict(record.case).identity: record for record in records}.values())


# A file: lines that say with what the following records were made, and one compact line per record.


def _line(record: Record) -> str:
    """A record as a line, without defaults, repetitions and what the file says once."""
    row = {
        field.name: value
        for field in fields(Record)
        if field.name != "environment" and (value := getattr(record, field.name)) not in (None, "")
    }
    row["case"] = Case.from_dict(record.case).to_compact_dict()
    for side in ("predicted", "measured"):
        if side in row:
            row[side] = row[side] | {"ranks": columns([_packed_rank(rank) for rank in row[side]["ranks"]])}
    return json.dumps(row, allow_nan=False, separators=(",", ":"))


def _record(row: Mapping[str, Any], environment: dict[str, Any] | None) -> Record:
    """The record of a line.

    Raises:
        MemplanError: if it is none: with the field and the rule.
    """
    unknown = set(row) - {field.name for field in fields(Record)}
    if unknown or not isinstance(row.get("case"), dict):
        what = f"has {shown_value(min(unknown))}" if unknown else "has no case"
        raise InvalidValue(f"it {what}")
    case = _case(row["case"])
    sides = {
        side: _unpacked(side, row[side], len(case.ranks))
        for side in ("predicted", "measured")
        if row.get(side) is not None
    }
    values = {**row, "environment": environment, "case": case.to_dict(), **sides}
    _checked()(values)
    record = Record(**values)
    if record.peak_error is not None and None in (record.states_off_bytes, record.collectives_off):
        raise InvalidValue("it has peak_error, but not states_off_bytes and collectives_off")
    return record


def _case(values: Mapping[str, Any]) -> Case:
    try:
        return Case.from_dict(values)
    except MemplanError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidValue(f"its case is none ({shown_value(error, 200)})") from None


def _unpacked(side: str, packed: Any, n_ranks: int) -> dict[str, Any]:
    """One side of a record with a row for each rank, as they are before `columns` packs them."""
    ranks = packed.get("ranks") if isinstance(packed, dict) else None
    if not isinstance(ranks, dict) or set(ranks) != {"n", "shared", "by_rank"}:
        raise InvalidValue(f"its {side}.ranks are not columns of n, shared and by_rank")
    if checked_count(f"its {side}.ranks.n", ranks["n"]) != n_ranks:
        raise InvalidValue(f"its {side}.ranks.n={ranks['n']} are not the {n_ranks} ranks of its case")
    if not isinstance(ranks["shared"], dict) or not isinstance(ranks["by_rank"], dict):
        raise InvalidValue(f"its {side}.ranks.shared or by_rank is no object")
    for name, values in ranks["by_rank"].items():
        if not isinstance(values, list) or len(values) != n_ranks:
            raise InvalidValue(f"its {side}.ranks.by_rank.{name[:40]} is no list of {n_ranks} values")
    found: dict[str, Any] = packed | {"ranks": [_unpacked_rank(rank) for rank in rows(ranks)]}
    return found


SCHEMA: Final = Path(__file__).with_name("record.schema.json")


@cache
def _checked() -> Callable[[dict[str, Any]], object]:
    """Raises InvalidValue for a record that is not as the schema says: with the field and the rule."""
    validate = fastjsonschema.compile(json.loads(SCHEMA.read_text(encoding="utf-8")), use_default=False)

    def check(record: dict[str, Any]) -> object:
        try:
            return validate(record)
        except fastjsonschema.JsonSchemaValueException as error:
            said = error.message.removeprefix("data.").removeprefix("data ")
            raise InvalidValue(f"its {said[:200]}") from None

    return check


_COLLECTIVE: Final = ("kind", "axis", "calls", "payload_bytes")


def _packed_rank(rank: Mapping[str, Any]) -> dict[str, Any]:
    known = rank.get("collectives", ())
    return dict(rank) | {"collectives": [[entry[key] for key in _COLLECTIVE] for entry in known]}


def _unpacked_rank(rank: Mapping[str, Any]) -> dict[str, Any]:
    packed = rank.get("collectives")
    if not isinstance(packed, list) or not all(
        isinstance(entry, list) and len(entry) == len(_COLLECTIVE) for entry in packed
    ):
        raise InvalidValue(f"its collectives are not lists of {', '.join(_COLLECTIVE)}")
    return dict(rank) | {"collectives": [dict(zip(_COLLECTIVE, entry, strict=True)) for entry in packed]}


LARGEST_BYTES: Final = 2**30
"""Files of records are read whole: a larger one has to be divided."""


def read_records(path: Path) -> list[Record]:
    """The records of a file; a last line without its end is left out.

    Raises:
        InvalidValue: a line that is no record, with its number.
    """
    try:
        content = file_bytes(path, most_bytes=LARGEST_BYTES, what="file of records")
    except MemplanError as error:
        raise of_file(path, error) from None
    return _records(path, content[: content.rfind(b"\n") + 1])


def _records(path: Path, content: bytes) -> list[Record]:
    records = []
    environment = None
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            row = _row(line)
            if row.keys() == {"environment"}:
                environment = _environment(row["environment"])
            else:
                records.append(_record(row, environment))
        except MemplanError as error:
            why = _one_line(str(error))
            raise InvalidValue(
                f"{shown_path(path)}, line {number} is not a record of validate: {why}; use a file that "
                "`sweep --out` wrote."
            ) from None
    return records


def _one_line(text: str) -> str:
    return " ".join(text.split()).rstrip(".;")[:400]


def _row(line: bytes) -> dict[str, Any]:
    """The object of a line; numbers are finite."""
    try:
        row = json.loads(line, parse_constant=_refused_number, parse_float=_finite)
    except RecursionError:
        raise InvalidValue("it is nested too deeply") from None
    except ValueError as error:
        raise error if isinstance(error, MemplanError) else InvalidValue(f"it is no JSON ({error})") from None
    if not isinstance(row, dict):
        raise InvalidValue(f"it is {type(row).__name__}, not an object")
    return row


def _finite(text: str) -> float:
    value = float(text)
    return value if isfinite(value) else _refused_number(text)


def _refused_number(text: str) -> float:
    raise InvalidValue(f"{text[:40]} is no finite number")


NO_CASE: Final = {"name": "", "model": {}, "plan": {}}
"""The case of a line that holds only the environment of the lines after it."""


def _environment(values: Any) -> dict[str, Any] | None:
    _checked()({"case": NO_CASE, "outcome": "refused", "environment": values})
    found: dict[str, Any] | None = values
    return found


STARTS: Final = (b'{"case":', b'{"environment":')
"""How every line starts."""


class RecordLines:
    """The lines of a file of records: an environment before the first record that was made with it."""

    def __init__(self, environment: dict[str, Any] | None = None) -> None:
        self._environment = environment

    def of(self, record: Record) -> list[str]:
        """The lines that a record adds."""
        lines = []
        if record.environment != self._environment:
            lines.append(json.dumps({"environment": record.environment}, separators=(",", ":")))
            self._environment = record.environment
        return [*lines, record.to_json()]


class RecordFile:
    """A file that one sweep adds records to; use `open_records`."""

    def __init__(self, lines: Lines) -> None:
        self.path = lines.path
        self.known = _records(lines.path, lines.content)
        lines.cut_torn_line()
        self._lines = lines
        self._texts = RecordLines(self.known[-1].environment if self.known else None)

    def append(self, record: Record) -> None:
        """Adds a record, to the disk: all of it or nothing.

        Raises:
            DiskFull: if it cannot be written; what the file had before it still has.
        """
        for line in self._texts.of(record):
            self._lines.append(line)


@contextmanager
def open_records(path: Path, *, resume: bool) -> Iterator[RecordFile]:
    """A file of records, locked to add to it, its folder made if need be.

    A last line that was cut off by a loss of power or a full disk is removed.

    Raises:
        InvalidValue: if it has records and they are not to be resumed, if another process is adding to it,
            or if it is no file of records.
        CannotWrite: if it is no regular file, or cannot be written.
    """
    with open_lines(path, resume=resume, starts=STARTS) as lines:
        yield RecordFile(lines)
