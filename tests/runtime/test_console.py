"""Closed standard streams and closed readers do not end a run."""

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from privssl.errors import UserError
from privssl.reporting.trackers import ProgressTracker, RoundRecord
from privssl.runtime import process
from privssl.runtime.console import (
    Screen,
    Terminal,
    ignore_closed_stream,
    results_to_standard_output,
)

ROOT = Path(__file__).parents[2]
#: The smallest run: these tests start new processes.
TINY = """\
data: {name: toy, labels: labels-at-server, labelled: 20}
agents: {query: 1}
model: {name: small_cnn, width: 4}
algorithm: {name: server_sl, rounds: 1, local_epochs: 1}
"""


class FailingStream(io.StringIO):
    """A stream whose writes fail."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error, self.tried = error, 0

    def write(self, text: str) -> int:
        self.tried += 1
        raise self.error


READER_GONE = [BrokenPipeError(32, "Broken pipe"), OSError(5, "Input/output error")]


@pytest.mark.parametrize("error", READER_GONE, ids=["pipe", "terminal"])
def test_console_log_and_progress_ignore_a_closed_reader(
    error: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = FailingStream(error)
    Terminal(file=stream).print("words")
    monkeypatch.setattr(sys, "stderr", stream)
    with process.logging_to(Screen()):
        process.log.error("words")
    tracker = ProgressTracker(2, stream=stream)
    tracker.round(RoundRecord(1, 2, "train", {}))
    tracker.close()
    assert stream.tried >= 3


def test_other_errors_than_a_closed_stream_are_raised() -> None:
    with pytest.raises(ValueError, match="ours"), ignore_closed_stream(io.StringIO()):
        raise ValueError("ours")
    closed = io.StringIO()
    closed.close()
    with ignore_closed_stream(closed):
        closed.write("words")


DISK_FULL = OSError(28, "No space left on device")


@pytest.mark.parametrize("error", [*READER_GONE, DISK_FULL], ids=["pipe", "terminal", "disk"])
@pytest.mark.parametrize("how", ["results", "table"])
def test_unwritable_results_are_an_error_unless_the_reader_has_closed_the_stream(
    error: OSError, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", FailingStream(error))
    written = results_to_standard_output if how == "results" else Terminal().print
    if error is DISK_FULL:
        with pytest.raises(UserError, match="Standard output cannot be written: No space"):
            written("{}")
    else:
        written("{}")


def test_a_full_disk_behind_standard_error_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", FailingStream(DISK_FULL))
    Terminal(stderr=True).print("words")


def run(folder: Path, *arguments: str, **how: Any) -> "subprocess.Popen[bytes]":
    (folder / "tiny.yaml").write_text(TINY)
    return subprocess.Popen(
        [sys.executable, "-m", "privssl.train", str(folder / "tiny.yaml"),
         f"run.output={folder / 'run'}", *arguments],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, **how,
    )  # fmt: skip


def status_of(folder: Path) -> str:
    results: dict[str, Any] = json.loads((folder / "run" / "results.json").read_text())
    return str(results["status"])


@pytest.mark.ci
def test_a_run_finishes_although_the_readers_of_both_streams_are_closed(tmp_path: Path) -> None:
    ends = [os.pipe() for _ in range(2)]
    for read, _ in ends:
        os.close(read)
    process = run(tmp_path, "--json", stdout=ends[0][1], stderr=ends[1][1])
    for _, write in ends:
        os.close(write)
    assert process.wait(timeout=600) == 0
    assert status_of(tmp_path) == "finished"


@pytest.mark.ci
def test_a_run_finishes_if_its_standard_streams_are_closed_at_the_start(tmp_path: Path) -> None:
    def close_standard_streams() -> None:
        os.closerange(0, 3)

    process = run(tmp_path, preexec_fn=close_standard_streams)
    assert process.wait(timeout=600) == 0
    assert status_of(tmp_path) == "finished"


# Signals --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("default_sighup")
def test_sighup_interrupts_a_command_unless_it_is_ignored() -> None:
    with process.interrupt_on_signals(*process.STOPPING), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGHUP)
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
    try:
        with process.interrupt_on_signals(*process.STOPPING):
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, former)


def test_an_interrupt_raised_in_a_finalizer_is_raised_again_at_the_next_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class InterruptingFinalizer:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)  # an exception cannot leave a finalizer

    monkeypatch.setattr(sys, "unraisablehook", lambda *_: None)
    with process.interrupt_on_signals(signal.SIGINT):
        process.raise_if_interrupted()
        dying = InterruptingFinalizer()
        del dying
        with pytest.raises(KeyboardInterrupt):
            process.raise_if_interrupted()
    process.raise_if_interrupted()
