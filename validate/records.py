"""One record per case: what was asked, predicted and measured, and the verdict; kept as JSON lines."""

import fcntl
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, Literal

from memplan.errors import InvalidValue, MemplanError
from validate.cases import Case
from validate.columns import columns, rows

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
    def worst_peaks(self) -> tuple[int, int] | None:
        """Predicted and measured peak of the rank that is farthest off; None unless both are known."""
        if self.predicted is None or self.measured is None:
            return None
        ranks = zip(self.predicted["ranks"], self.measured["ranks"], strict=True)
        pairs = [(ahead["peak_bytes"], seen["peak_bytes"]) for ahead, seen in ranks]
        return max(pairs, key=lambda pair: abs(pair[0] / pair[1] - 1))

    def to_json(self) -> str:
        """One line of JSON with every field."""
        return json.dumps(asdict(self), allow_nan=False)


def merged(records: Iterable[Record]) -> list[Record]:
    """One record per case: of several the last, at the place of the first.

    Cases are the same if their name, model, plan, seed and steps are.
    """
    return list({Case.from_dict(record.case).identity: record for record in records}.values())


# A file: lines that say with what the following records were made, and one compact line per record.


def _line(record: Record) -> str:
    """A record without what is a default, is said twice or is said by the file."""
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
    record = Record(**row, environment=environment)
    sides = {
        side: known | {"ranks": [_unpacked_rank(rank) for rank in rows(known["ranks"])]}
        for side in ("predicted", "measured")
        if (known := row.get(side)) is not None
    }
    return replace(record, case=Case.from_dict(row["case"]).to_dict(), **sides)


_COLLECTIVE: Final = ("kind", "axis", "calls", "payload_bytes")


def _packed_rank(rank: Mapping[str, Any]) -> dict[str, Any]:
    known = rank.get("collectives", ())
    return dict(rank) | {"collectives": [[entry[key] for key in _COLLECTIVE] for entry in known]}


def _unpacked_rank(rank: Mapping[str, Any]) -> dict[str, Any]:
    entries = [dict(zip(_COLLECTIVE, entry, strict=True)) for entry in rank["collectives"]]
    return dict(rank) | {"collectives": entries}


def read_records(path: Path) -> list[Record]:
    """The records of a file; a last line without its end is left out.

    Raises:
        InvalidValue: a line that is no record, with its number.
    """
    content = path.read_bytes()
    return _records(path, content[: content.rfind(b"\n") + 1])


def _records(path: Path, content: bytes) -> list[Record]:
    records = []
    environment = None
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            row = json.loads(line)
            if row.keys() == {"environment"}:
                environment = row["environment"]
            else:
                records.append(_record(row, environment))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InvalidValue(
                f"{path}, line {number} is not a record of validate ({error}); "
                "use a file that `sweep --out` wrote."
            ) from None
    return records


STARTS: Final = (b'{"case":', b'{"environment":')
"""How every line starts."""


def _whole_bytes(content: bytes) -> int:
    """The length of a file without a last line that was not written to its end."""
    end = content.rfind(b"\n") + 1
    if end < len(content):
        return end if _is_torn(content[end:]) else len(content)
    start = content.rfind(b"\n", 0, max(end - 1, 0)) + 1
    try:
        json.loads(content[start:end] or b"{}")
    except ValueError:
        return start if _is_torn(content[start:end]) else end
    return end


def _is_torn(line: bytes) -> bool:
    """Whether it is the beginning of a line of ours, or the zeros that a loss of power leaves."""
    begun = any(line.startswith(start) or start.startswith(line) for start in STARTS)
    return begun or not line.strip(b"\0\n")


class DiskFull(MemplanError):
    """A record that could not be kept."""


class RecordFile:
    """A file that one sweep adds records to; use `open_records`."""

    def __init__(self, path: Path, descriptor: int, known: list[Record]) -> None:
        self.path = path
        self.known = known
        self._descriptor = descriptor
        self._environment = known[-1].environment if known else None

    def append(self, record: Record) -> None:
        """Adds a record, to the disk: all of it or nothing.

        Raises:
            DiskFull: if it cannot be written; what the file had before it still has.
        """
        if record.environment != self._environment:
            self._write(json.dumps({"environment": record.environment}, separators=(",", ":")))
            self._environment = record.environment
        self._write(_line(record))

    def _write(self, line: str) -> None:
        content = line.encode() + b"\n"
        end = os.fstat(self._descriptor).st_size
        try:
            written = os.write(self._descriptor, content)
            while written < len(content):
                written += os.write(self._descriptor, content[written:])
            os.fsync(self._descriptor)
        except OSError as error:
            os.ftruncate(self._descriptor, end)
            raise DiskFull(
                f"{self.path} cannot be written ({error.strerror}); its records so far are safe: make room "
                "and continue with --resume."
            ) from None


@contextmanager
def open_records(path: Path, *, resume: bool) -> Iterator[RecordFile]:
    """A file of records, locked to add to it, its folder made if need be.

    A last line that was cut off by a loss of power or a full disk is removed.

    Raises:
        InvalidValue: if it has records and they are not to be resumed, if another process is adding to it,
            or if it is no file of records.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidValue(
                f"another sweep is adding to {path}; wait for it, or use another file for --out."
            ) from None
        if os.fstat(descriptor).st_size and not resume:
            raise InvalidValue(
                f"{path} exists; use --resume to run the cases that it lacks, or another file for --out."
            )
        content = path.read_bytes()
        whole_bytes = _whole_bytes(content)
        known = _records(path, content[:whole_bytes])
        if whole_bytes < len(content):
            os.ftruncate(descriptor, whole_bytes)
        yield RecordFile(path, descriptor, known)
    finally:
        os.close(descriptor)
