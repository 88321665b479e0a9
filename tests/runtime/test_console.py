"""Standard output and error whose reader has left, or which a caller closed: no run ends for it."""

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
#: The least that a run can be: processes here start anew, with the streams that they get.
TINY = """\
data: {name: toy, labels: labels-at-server, labelled: 20}
agents: {query: 1}
model: {name: small_cnn, width: 4}
algorithm: {name: server_sl, rounds: 1, local_epochs: 1}
"""


class Gone(io.StringIO):
    """What nobody reads any more."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error, self.tried = error, 0

    def write(self, text: str) -> int:
        self.tried += 1
        raise self.error


GONE = [BrokenPipeError(32, "Broken pipe"), OSError(5, "Input/output error")]


@pytest.mark.parametrize("error", GONE, ids=["pipe", "terminal"])
def test_a_console_a_log_and_progress_go_on_without_a_reader(
    error: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Gone(error)
    Terminal(file=stream).print("words")
    monkeypatch.setattr(sys, "stderr", stream)
    with process.logging_to(Screen()):
        process.log.error("words")
    tracker = ProgressTracker(2, stream=stream)
    tracker.round(RoundRecord(1, 2, "train", {}))
    tracker.close()
    assert stream.tried >= 3


def test_a_mistake_of_ours_is_not_taken_for_a_reader_who_left() -> None:
    with pytest.raises(ValueError, match="ours"), ignore_closed_stream(io.StringIO()):
        raise ValueError("ours")
    closed = io.StringIO()
    closed.close()
    with ignore_closed_stream(closed):
        closed.write("words")


FULL = OSError(28, "No space left on device")


@pytest.mark.parametrize("error", [*GONE, FULL], ids=["pipe", "terminal", "disk"])
@pytest.mark.parametrize("how", ["results", "table"])
def test_results_that_cannot_be_written_are_told_unless_their_reader_left(
    error: OSError, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", Gone(error))
    written = results_to_standard_output if how == "results" else Terminal().print
    if error is FULL:
        with pytest.raises(UserError, match="Standard output cannot be written: No space"):
            written("{}")
    else:
        written("{}")


def test_a_full_disk_under_standard_error_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Gone(FULL))
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


def test_a_run_is_finished_although_the_readers_of_both_streams_have_left(tmp_path: Path) -> None:
    ends = [os.pipe() for _ in range(2)]
    for read, _ in ends:
        os.close(read)
    process = run(tmp_path, "--json", stdout=ends[0][1], stderr=ends[1][1])
    for _, write in ends:
        os.close(write)
    assert process.wait(timeout=600) == 0
    assert status_of(tmp_path) == "finished"


def test_files_never_get_the_numbers_of_streams_that_a_caller_closed(tmp_path: Path) -> None:
    def close_them() -> None:
        os.closerange(0, 3)

    process = run(tmp_path, preexec_fn=close_them)
    assert process.wait(timeout=600) == 0
    assert status_of(tmp_path) == "finished"


# Signals --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("default_sighup")
def test_a_terminal_that_is_closed_stops_a_command_unless_it_is_to_be_ignored() -> None:
    with process.interrupt_on_signals(*process.STOPPING), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGHUP)
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
    try:
        with process.interrupt_on_signals(*process.STOPPING):
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, former)


def test_an_interrupt_that_python_swallowed_is_raised_again_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Dying:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)  # its exception cannot leave from here

    monkeypatch.setattr(sys, "unraisablehook", lambda *_: None)
    with process.interrupt_on_signals(signal.SIGINT):
        process.raise_if_interrupted()
        dying = Dying()
        del dying
        with pytest.raises(KeyboardInterrupt):
            process.raise_if_interrupted()
    process.raise_if_interrupted()
