"""The process of a run: its status and cost, how it is stopped, and its lock."""

import json
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from privssl.reproduce import __main__ as reproduce
from privssl.reproduce import runner
from privssl.reproduce.runner import Ended, _start_training, _try_lock, train_in_a_process
from tests.support.forked_command import ForkedCommand
from tests.support.table_clone import make_clone


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Use a shell script as the training command."""

    def write(text: str) -> None:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))

    return write


def run_script(folder: Path, until: float = float("inf")) -> Ended:
    with _try_lock(folder / "lock") as lock:
        assert lock is not None
        return train_in_a_process([], folder / "log", lock, until)


def test_a_process_reports_status_time_and_memory(
    tmp_path: Path, script: Callable[[str], None]
) -> None:
    script("echo said; exit 3")
    ended = run_script(tmp_path)

    assert (ended.status, ended.stopped) == (3, False)
    assert 0 < ended.wall < 60 and ended.peak_mb > 0.1
    assert (tmp_path / "log").read_text() == "said\n"
    script("kill -9 $$")
    assert run_script(tmp_path).status == -signal.SIGKILL


def test_a_process_is_interrupted_when_its_time_is_up(
    tmp_path: Path, script: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = tmp_path / "ready"
    # The time limit starts when the script can be interrupted, however long the shell takes to
    # start.
    clock = SimpleNamespace(monotonic=lambda: float(ready.exists()), sleep=time.sleep)
    monkeypatch.setattr(runner, "time", clock)
    script(f"trap 'exit 130' TERM; touch {ready}; while true; do sleep 0.05; done")
    ended = run_script(tmp_path, until=1.0)

    assert (ended.status, ended.stopped) == (130, True)


def test_a_run_that_outlives_its_parent_keeps_the_lock(
    tmp_path: Path, script: Callable[[str], None]
) -> None:
    script("exec sleep 30")
    with _try_lock(tmp_path / "lock") as lock:
        assert lock is not None
        child = _start_training([], tmp_path / "log", lock)
    try:  # as if the parent had died
        with _try_lock(tmp_path / "lock") as lock:
            assert lock is None
    finally:
        child.kill()
        child.wait()
    with _try_lock(tmp_path / "lock") as lock:  # the control
        assert lock is not None


def test_ctrl_c_reaches_the_run_which_writes_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clone = make_clone(tmp_path)
    clone.change("name: supervise}", "name: supervise, algorithm.rounds: 20000}")
    folder = tmp_path / "runs" / "reproduce" / "small" / "supervise--40-labels-2-2"
    arguments = ["small", "--cells", "Supervise/40*", "--seeds", "1"]
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # of the run that it starts
    process = ForkedCommand(
        partial(reproduce.main, root=tmp_path), arguments, tmp_path, cwd=tmp_path
    )
    until = time.monotonic() + 600
    while not list(folder.glob("0/checkpoints/round_0*[1-9]*")) and time.monotonic() < until:
        time.sleep(0.05)
        assert process.poll() is None, process.communicate(1)
    process.send_signal(signal.SIGINT)
    out = "".join(process.communicate(timeout=600))

    assert process.returncode == 130, out
    assert "nothing is lost" in out and "Traceback" not in out
    assert not list(tmp_path.rglob("results/*/*/*.json"))
    assert json.loads((folder / "0" / "results.json").read_text())["status"] == "interrupted"
