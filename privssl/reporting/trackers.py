"""Trackers of a run's numbers and pictures: TensorBoard, a CSV file, the console.

All three get the same record once per round. Rounds that a resumed run repeats replace the former
ones. ``metrics.csv`` has only values that the seed determines, so a resumed run ends with the same
bytes; wall-clock values (``time/*``) go only to TensorBoard and the console.
"""

import csv
import io
import logging
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, TextIO

import numpy as np
from numpy.typing import NDArray
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from privssl.errors import RunFolderError, first_few
from privssl.runtime.console import Terminal, ignore_closed_stream
from privssl.runtime.process import defer_interrupts, without_tensorflow
from privssl.storage import atomic_files

log = logging.getLogger("privssl")

Image = NDArray[np.uint8]  # (H, W) or (H, W, 3)
EVENTS = "events.out.tfevents.*"  # TensorBoard's files


@dataclass(frozen=True)
class RoundRecord:
    """The numbers of one round: ``round`` counts from 1 to ``total``; values by TensorBoard tag."""

    round: int
    total: int
    phase: str
    values: Mapping[str, float]


class Tracker(Protocol):
    """A consumer of records and pictures in the order of rounds. Raises RunFolderError."""

    def round(self, record: RoundRecord) -> None: ...

    def images(self, round_number: int, tag: str, image: Image) -> None:
        """Record a picture."""
        return

    def keep(self) -> None:
        """Make all rounds so far as durable as the next checkpoint."""
        return

    def close(self) -> None:
        """Close. May be called twice."""
        return


class TensorBoardTracker(Tracker):
    """Event files in a folder; the x-axis is the round. Points after round ``resume_after`` are
    removed.

    Interrupts are deferred in each call: TensorBoard writes in a thread, and Ctrl-C could leave its
    queue locked.
    """

    def __init__(self, folder: Path, resume_after: int | None = None) -> None:
        without_tensorflow()
        self._folder = folder
        purge = None if resume_after is None else resume_after + 1
        with defer_interrupts(), atomic_files.writing(folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._writer = _open_event_writer(folder, purge)

    def round(self, record: RoundRecord) -> None:
        with defer_interrupts(), atomic_files.writing(self._folder):
            for tag, value in record.values.items():
                self._writer.add_scalar(tag, value, record.round)
            # Each round, so that a killed run has the points of all checkpointed rounds.
            self._writer.flush()

    def images(self, round_number: int, tag: str, image: Image) -> None:
        with defer_interrupts(), atomic_files.writing(self._folder):
            layout = "HW" if image.ndim == 2 else "HWC"
            self._writer.add_image(tag, image, round_number, dataformats=layout)
            self._writer.flush()

    def close(self) -> None:
        with defer_interrupts(), atomic_files.writing(self._folder):
            self._writer.close()


def _open_event_writer(folder: Path, purge: int | None) -> Any:
    """Return a writer whose file TensorBoard reads last.

    Files are read in the order of their names, which begin with the second; within one second the
    tenth writer of a process would sort before its ninth.
    """
    # Imported here: runs without TensorBoard save a second.
    from torch.utils.tensorboard import SummaryWriter

    old = set(folder.glob(EVENTS))
    deadline = time.monotonic() + 2
    while True:
        writer: Any = SummaryWriter(str(folder), purge_step=purge)
        current = set(folder.glob(EVENTS))
        # At the end of the loop: the clock was set back, and no name sorts last.
        if max(current) not in old or time.monotonic() > deadline:
            return writer
        writer.close()
        for path in current - old:
            path.unlink()
        time.sleep(0.1)


class CsvTracker(Tracker):
    """A CSV file with a line per round, written immediately. A value that appears later gets a new
    column at the right. ``resume_after``: the last round to keep on resume; absent: replace the
    file."""

    def __init__(self, path: Path, resume_after: int | None = None) -> None:
        self._path = path
        self._columns: list[str] = []
        self._file: TextIO | None = None
        if resume_after is not None:
            self.truncate(resume_after)
        else:
            with atomic_files.writing(path):
                path.unlink(missing_ok=True)

    def truncate(self, after_round: int) -> None:
        """Remove the lines of all later rounds, and a torn last line."""
        self.close()
        header, rows = self._read_rows()
        self._columns = header[1:]
        kept = [row for row in rows if int(row[0]) <= after_round]
        rounds = [int(row[0]) for row in kept]
        if rounds != list(range(1, after_round + 1)):
            missing = sorted(set(range(1, after_round + 1)) - set(rounds))
            problem = (
                f"lacks {len(missing)} rounds ({first_few(missing)})"
                if missing
                else "has rounds twice or unordered"
            )
            log.warning("%s %s. The run continues; its curves have a gap", self._path, problem)
        if header:
            self._rewrite(kept)

    def round(self, record: RoundRecord) -> None:
        values = {k: _as_text(v) for k, v in record.values.items() if not k.startswith("time/")}
        new = [name for name in values if name not in self._columns]
        if new or self._file is None:
            self.close()
            rows = self._read_rows()[1]
            self._columns += new
            self._rewrite(rows)
            with atomic_files.writing(self._path):
                self._file = self._path.open("a", encoding="utf-8", newline="")
        with atomic_files.writing(self._path):
            cells = [values.get(name, "") for name in self._columns]
            self._file.write(csv_text([[str(record.round), *cells]]))
            self._file.flush()

    def keep(self) -> None:
        if self._file is not None:
            with atomic_files.writing(self._path):
                os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            with atomic_files.writing(self._path):
                file.close()

    def _read_rows(self) -> tuple[list[str], list[list[str]]]:
        """Read header and complete lines, without a last line torn by a kill."""
        try:
            text = self._path.read_text(encoding="utf-8")
            lines = list(csv.reader(io.StringIO(text[: text.rfind("\n") + 1])))
        except FileNotFoundError:
            lines = []
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise RunFolderError(f"{self._path}: cannot be read: {error}") from error
        header, *rows = lines or [[]]
        for number, row in enumerate(rows, start=2):
            if not row or not row[0].isdecimal() or len(row) != len(header):
                raise RunFolderError(
                    f"{self._path}, line {number}: not a line of this file. Correct or delete it"
                )
        return header, rows

    def _rewrite(self, rows: Iterable[list[str]]) -> None:
        width = len(self._columns) + 1
        padded = [row + [""] * (width - len(row)) for row in rows]
        atomic_files.write(self._path, csv_text([["round", *self._columns], *padded]))


def _as_text(value: float) -> str:
    """Return the shortest text that reads back as the same number."""
    return str(int(value)) if isinstance(value, int) else repr(float(value))


def for_the_log(values: Mapping[str, float], *, nominal: bool) -> str:
    """Return the line of a round in train.log: accuracies, and epsilon spent; empty without either.
    ``nominal``: whether epsilons are nominal."""
    prefix = "NOMINAL dp/epsilon/" if nominal else "dp/epsilon/"
    return ", ".join(
        f"{name.replace('dp/epsilon/', prefix)} {value:.4f}"
        for name, value in values.items()
        if name.startswith(("test/accuracy", "validation/accuracy", "dp/epsilon/"))
    )


def csv_text(rows: Iterable[Sequence[object]]) -> str:
    """Format rows as CSV."""
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(rows)
    return buffer.getvalue()


class ProgressTracker(Tracker):
    """A progress bar on a terminal, else occasional lines. A closed stream does not end the run.

    Args:
        total: rounds of the run, or of all runs of a comparison together.
        resume_after: the last round of an earlier session, excluded from the time estimate.
        stream: standard error if absent, because standard output may contain results.
        every_s: seconds between two plain lines. The first and last round are always printed.
        nominal: whether epsilons are nominal.
    """

    def __init__(
        self,
        total: int,
        resume_after: int | None = None,
        stream: TextIO | None = None,
        every_s: float = 10.0,
        *,
        nominal: bool = False,
    ) -> None:
        self._total, self._every_s = total, every_s
        self._stream = stream or sys.stderr
        self._started, self._printed = time.monotonic(), -float("inf")
        self._done = self._skipped = 0  # rounds of all runs; those of earlier sessions
        self._bar: Progress | None = None
        if self._stream.isatty():
            self._bar = Progress(
                TextColumn("{task.description}"), BarColumn(bar_width=20), TimeElapsedColumn(),
                TextColumn("{task.fields[left]} left"), console=Terminal(file=self._stream),
            )  # fmt: skip
            self._task = self._bar.add_task("starting", total=total, left="?")
            self._bar.start()
        self.begin("", resume_after or 0, nominal=nominal)

    def begin(self, title: str, resume_after: int, *, nominal: bool) -> None:
        """Start the next run; ``title`` is printed before its rounds."""
        self._title, self._first = title, resume_after + 1
        self._offset = self._done  # rounds of earlier runs
        self._skipped += resume_after
        self._epsilon = "NOMINAL epsilon" if nominal else "epsilon"
        self._latest: dict[str, float] = {}

    def round(self, record: RoundRecord) -> None:
        self._latest.update(record.values)
        self._done = self._offset + record.round
        now = time.monotonic()
        elapsed = now - self._started
        seconds = elapsed / (self._done - self._skipped) * (self._total - self._done)
        left = timedelta(seconds=round(seconds))
        text = (
            f"{self._title}round {record.round}/{record.total}: {self._format_note(record.phase)}"
        )
        with ignore_closed_stream(self._stream):
            if self._bar is not None:
                self._bar.update(self._task, completed=self._done, description=text, left=left)
            elif (
                record.round in (self._first, record.total) or now - self._printed >= self._every_s
            ):
                self._printed = now
                times = f"{timedelta(seconds=round(elapsed))} elapsed, {left} left"
                print(f"{text}, {times}", file=self._stream, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            with ignore_closed_stream(self._stream):
                self._bar.stop()

    def _format_note(self, phase: str) -> str:
        parts = [phase]
        if "test/accuracy" in self._latest:
            parts.append(f"test accuracy {self._latest['test/accuracy']:.4f}")
        left = [v for k, v in self._latest.items() if k.startswith("dp/budget_left/")]
        if left:
            parts.append(f"{self._epsilon} left {min(left):.2f}")
        return ", ".join(parts)
