"""Trackers: a line per round, the same bytes after a resume, no repeated points."""

import contextlib
import csv
import errno
import io
import math
import os
import re
import signal
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
    EventAccumulator,
)
from tensorboard.summary.writer import event_file_writer  # type: ignore[import-untyped]

from privssl.errors import RunFolderError
from privssl.reporting.trackers import (
    CsvTracker,
    ProgressTracker,
    RoundRecord,
    TensorBoardTracker,
    Tracker,
)
from privssl.runtime import process


def record(number: int, total: int = 100, **values: float) -> RoundRecord:
    return RoundRecord(number, total, "train", {k.replace("__", "/"): v for k, v in values.items()})


def write(path: Path, *records: RoundRecord, resume_after: int | None = None) -> str:
    tracker = CsvTracker(path, resume_after)
    for one in records:
        tracker.round(one)
    tracker.close()
    return path.read_text()


# CSV ----------------------------------------------------------------------------------------


def test_a_round_is_a_line_without_wall_clock_values(tmp_path: Path) -> None:
    text = write(
        tmp_path / "metrics.csv",
        record(1, test__accuracy=0.5, time__round_s=1.23, comm__up_bytes=12),
        record(2, test__accuracy=0.1 + 0.2, time__round_s=4.56, comm__up_bytes=13),
    )
    assert text == ("round,test/accuracy,comm/up_bytes\n1,0.5,12\n2,0.30000000000000004,13\n")


def test_each_line_can_be_read_as_soon_as_its_round_ends(tmp_path: Path) -> None:
    tracker = CsvTracker(tmp_path / "metrics.csv")
    tracker.round(record(1, a=1.0))
    assert (tmp_path / "metrics.csv").read_text() == "round,a\n1,1.0\n"
    tracker.close()
    tracker.close()  # may be called twice


def test_a_missing_value_is_empty_and_a_new_one_gets_a_column(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    text = write(path, record(1, a=1.0, b=2.0), record(2, b=3.0), record(3, c=4.0, a=5.0))
    assert text == "round,a,b,c\n1,1.0,2.0,\n2,,3.0,\n3,5.0,,4.0\n"
    assert [item.name for item in tmp_path.iterdir()] == ["metrics.csv"]


@given(st.lists(st.floats(), min_size=1, max_size=5), st.text(min_size=1, max_size=5))
@settings(max_examples=25, deadline=None)
def test_every_number_and_name_reads_back_unchanged(
    tmp_path_factory: pytest.TempPathFactory, numbers: list[float], name: str
) -> None:
    name = "x/" + re.sub(r"[\ud800-\udfff\x00\r\n]", "", name)
    records = [RoundRecord(i, 9, "", {name: np.float64(x)}) for i, x in enumerate(numbers, 1)]
    text = write(tmp_path_factory.mktemp("csv") / "metrics.csv", *records)
    header, *rows = csv.reader(io.StringIO(text))
    assert header == ["round", name]
    for row, number in zip(rows, numbers, strict=True):
        assert float(row[1]) == number or (math.isnan(number) and row[1] == "nan")


def long_run() -> list[RoundRecord]:
    """Twelve rounds with a second phase that has its own value."""
    first = [record(i, loss=1 / i, time__s=i) for i in range(1, 7)]
    return first + [record(i, loss=1 / i, gap=i * 0.1, time__s=i) for i in range(7, 13)]


@pytest.mark.parametrize("killed_after", range(1, 13))
@pytest.mark.parametrize("torn", ["", "1", "9,0.1,", "9,0.12"])
def test_a_resumed_run_ends_with_the_bytes_of_an_uninterrupted_one(
    tmp_path: Path, killed_after: int, torn: str
) -> None:
    whole = write(tmp_path / "whole.csv", *long_run())
    path = tmp_path / "resumed.csv"
    write(path, *long_run()[:killed_after])
    with path.open("a") as file:
        file.write(torn)
    checkpoint = killed_after // 4 * 4
    slower = [RoundRecord(r.round, 12, "", {**r.values, "time/s": 99.0}) for r in long_run()]
    assert write(path, *slower[checkpoint:], resume_after=checkpoint) == whole


def test_without_truncation_a_resumed_run_would_repeat_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    write(path, *long_run()[:6])
    text = write(path, *long_run()[4:], resume_after=6)  # the control of the test above
    assert text != write(tmp_path / "whole.csv", *long_run())


def test_a_new_run_replaces_the_file_of_an_old_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    write(path, record(1, a=1.0))
    assert write(path, record(1, b=2.0)) == "round,b\n1,2.0\n"


def test_truncating_a_missing_file_does_nothing(tmp_path: Path) -> None:
    CsvTracker(tmp_path / "metrics.csv", resume_after=0).close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("line", ["x,1.0\n", "3\n", "3,1.0,2.0\n", "\n"])
def test_a_file_in_another_format_is_named_with_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("round,a\n1,2.0\n" + line)
    with pytest.raises(RunFolderError, match=r"metrics.csv, line 3: not a line of this file"):
        CsvTracker(path, resume_after=9)


class FullDisk(io.StringIO):
    """A file on a full disk."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_reported_with_the_name_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = CsvTracker(tmp_path / "metrics.csv")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda *args, **kwargs: FullDisk())
        with pytest.raises(RunFolderError, match=r"metrics.csv: cannot be written: No space left"):
            tracker.round(record(1, a=1.0))
    with pytest.raises(RunFolderError, match=r"absent/metrics.csv: cannot be written: No such"):
        CsvTracker(tmp_path / "absent/metrics.csv").round(record(1, a=1.0))


# TensorBoard --------------------------------------------------------------------------------


def events(folder: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return accumulator


def points(folder: Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events(folder).Scalars(tag)]


def test_the_x_axis_is_the_round(tmp_path: Path) -> None:
    tracker = TensorBoardTracker(tmp_path)
    tracker.round(record(1, test__accuracy=0.5, time__round_s=2.0))
    assert points(tmp_path, "test/accuracy") == [(1, 0.5)]  # flushed, although not closed
    tracker.round(record(2, test__accuracy=0.75))
    tracker.images(2, "images/mixes", np.zeros((4, 6, 3), np.uint8))
    tracker.images(2, "images/grey", np.full((4, 6), 128, np.uint8))
    tracker.close()
    assert points(tmp_path, "test/accuracy") == [(1, 0.5), (2, 0.75)]
    assert points(tmp_path, "time/round_s") == [(1, 2.0)]
    for tag in ("images/mixes", "images/grey"):
        [image] = events(tmp_path).Images(tag)
        assert (image.step, image.width, image.height) == (2, 6, 4)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("writers", [0, 9, 99])
def test_a_resumed_run_draws_no_round_twice_for_any_number_of_former_writers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writers: int
) -> None:
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(writers))

    def draw(resume_after: int | None, rounds: range, value: float) -> list[tuple[int, float]]:
        tracker = TensorBoardTracker(tmp_path, resume_after)
        for number in rounds:
            tracker.round(record(number, a=value))
        tracker.close()
        return points(tmp_path, "a")

    draw(None, range(1, 5), 1.0)
    assert draw(2, range(3, 6), 2.0) == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 2.0)]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("a file is in the way")
    with pytest.raises(RunFolderError, match=r"tensorboard: cannot be written"):
        TensorBoardTracker(tmp_path / "tensorboard")


@pytest.mark.parametrize(
    ("lines", "what"),
    [
        ([1, 2, 3, 4], ""),
        ([1, 2, 3, 4, 5, 6], ""),  # rounds after the checkpoint are written again
        ([1, 2], "lacks 2 rounds (3, 4)"),
        ([1, 3, 4], "lacks 1 rounds (2)"),
        ([], "lacks 4 rounds (1, 2, 3, 4)"),
        ([1, 2, 2, 3, 4], "has rounds twice or unordered"),
    ],
)
def test_rounds_missing_from_the_curves_of_a_resumed_run_are_reported(
    lines: list[int], what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.csv"
    if lines:
        path.write_text("round,a\n" + "".join(f"{number},0.5\n" for number in lines))
    with caplog.at_level("WARNING"):
        CsvTracker(path, resume_after=4).close()
    assert [r.getMessage() for r in caplog.records if what and what in r.getMessage()] or not what
    assert len(caplog.records) == bool(what)


def test_lines_are_on_disk_before_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker, forced, real = CsvTracker(tmp_path / "metrics.csv"), list[bytes](), os.fsync

    def fsync(number: int) -> None:
        real(number)
        forced.append(Path(f"/proc/self/fd/{number}").read_bytes())

    tracker.round(record(1, a=0.5))
    monkeypatch.setattr(os, "fsync", fsync)
    tracker.round(record(2, a=0.5))
    assert not forced  # a round does not wait for the disk
    tracker.keep()
    assert forced == [b"round,a\n1,0.5\n2,0.5\n"]
    tracker.close()
    tracker.keep()


# Screen -------------------------------------------------------------------------------------


class Clock:
    """Monotonic time that tests advance."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("privssl.reporting.trackers.time.monotonic", clock)
    return clock


def test_without_a_terminal_a_plain_line_is_printed_at_intervals(clock: Clock) -> None:
    stream = io.StringIO()
    tracker = ProgressTracker(20, stream=stream, every_s=10)
    for number in range(1, 21):
        clock.now += 3  # a round takes 3 s: lines at 3, then 15, 27, 39, 51 and the last, 60
        budget = {"dp__budget_left__s0": 8 - number / 10, "dp__budget_left__s1": 7 - number / 10}
        accuracy = {"test__accuracy": 0.5} if number == 1 else {}
        tracker.round(record(number, 20, **budget, **accuracy))
    tracker.close()
    lines = stream.getvalue().splitlines()
    # 9 rounds in 27 s leave 11 rounds, 33 s; the printed budget is that of the agent with the least
    # left
    assert lines[2] == (
        "round 9/20: train, test accuracy 0.5000, epsilon left 6.10, 0:00:27 elapsed, 0:00:33 left"
    )
    assert [line.split()[1] for line in lines] == [
        "1/20:",
        "5/20:",
        "9/20:",
        "13/20:",
        "17/20:",
        "20/20:",
    ]


def test_the_remaining_time_counts_only_rounds_of_this_session(clock: Clock) -> None:
    stream = io.StringIO()
    tracker = ProgressTracker(100, resume_after=90, stream=stream, every_s=0)
    for number in (91, 92):  # resumed after round 90
        clock.now += 60
        tracker.round(record(number))
    # two rounds in 2 minutes leave 8 rounds: 8 minutes
    assert (
        stream.getvalue().splitlines()[-1] == "round 92/100: train, 0:02:00 elapsed, 0:08:00 left"
    )


def test_the_remaining_time_of_several_runs_counts_all_rounds_and_none_of_earlier_sessions(
    clock: Clock,
) -> None:
    stream = io.StringIO()
    tracker = ProgressTracker(8, stream=stream, every_s=0)
    tracker.begin("run 1/2 a, ", 2, nominal=False)  # rounds 1 and 2 of 4 are of an earlier session
    for number in (3, 4):
        clock.now += 6
        tracker.round(record(number, 4))
    tracker.begin("run 2/2 b, ", 0, nominal=True)
    clock.now += 3
    tracker.round(record(1, 4, dp__budget_left__s0=1.0))
    # 3 rounds of this session in 15 s; 3 of the 8 are left, at 5 s
    assert stream.getvalue().splitlines()[-1] == (
        "run 2/2 b, round 1/4: train, NOMINAL epsilon left 1.00, 0:00:15 elapsed, 0:00:15 left"
    )


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_there_is_a_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    stream = Terminal()
    tracker = ProgressTracker(20, stream=stream)
    tracker.round(record(3, 20, test__accuracy=0.875))
    tracker.close()
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())
    assert "round 3/20" in shown
    assert "train, test accuracy 0.8750" in shown
    assert "\n".join(shown.splitlines()).count("elapsed") == 0  # and no plain lines


def test_all_trackers_have_the_interface_and_accept_pictures(tmp_path: Path) -> None:
    trackers: list[Tracker] = [
        CsvTracker(tmp_path / "metrics.csv"),
        ProgressTracker(9, stream=io.StringIO()),
        TensorBoardTracker(tmp_path),
    ]
    picture: Any = np.zeros((2, 2, 3), np.uint8)
    for tracker in trackers:
        tracker.images(1, "images/x", picture)
        tracker.close()


@pytest.mark.parametrize("whole", [True, False], ids=["done whole", "control"])
def test_an_interrupt_waits_until_tensorboard_has_written_a_record(
    whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An interrupt inside would leave TensorBoard's queue locked, and closing would wait for ever.
    if not whole:
        monkeypatch.setattr("privssl.reporting.trackers.defer_interrupts", contextlib.nullcontext)
    board = TensorBoardTracker(tmp_path)
    reached, flush = list[str](), board._writer.flush

    def stopped_in_the_middle() -> None:
        signal.raise_signal(signal.SIGINT)
        reached.append("the end")
        flush()

    with monkeypatch.context() as patched:
        patched.setattr(board._writer, "flush", stopped_in_the_middle)
        with process.interrupt_on_signals(signal.SIGINT), pytest.raises(KeyboardInterrupt):
            board.round(RoundRecord(1, 1, "train", {"a": 1.0}))
    assert reached == (["the end"] if whole else [])
    board.close()
