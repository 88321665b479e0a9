"""A command in a forked process, for tests of signals and of how processes end.

The fork has torch loaded already, which saves seconds. Tests of imports and standard streams need a
new process instead.
"""

import io
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path


class ForkedCommand:
    """``main(arguments)`` in a fork, with the methods of ``subprocess.Popen`` that tests use."""

    def __init__(
        self, main: Callable[[list[str]], int], arguments: Sequence[object], folder: Path,
        *, cwd: Path | None = None, own_session: bool = False,
    ) -> None:  # fmt: skip
        """``folder``: for files with the output."""
        self._printed = folder / "printed-out", folder / "printed-err"
        texts = [str(argument) for argument in arguments]
        self._process = multiprocessing.get_context("fork").Process(
            target=_live, args=(main, texts, self._printed, cwd, own_session)
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads beside a fork
            self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit status, or minus a signal's number; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for its end, at most ``timeout`` seconds."""
        self._process.join(timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for its end; return its standard output and error."""
        if self.wait(timeout) is None:
            self.kill()
            raise TimeoutError(f"it did not end within {timeout} s")
        out, err = (path.read_text(encoding="utf-8") for path in self._printed)
        return out, err


def wait_for(path: Path, process: ForkedCommand) -> None:
    """Wait until a file appears, or the process ends."""
    end = time.monotonic() + 300
    while time.monotonic() < end:
        if path.exists() or process.poll() is not None:
            return
        time.sleep(0.01)
    process.kill()
    raise AssertionError(f"{path} did not appear")


def _live(
    main: Callable[[list[str]], int], arguments: list[str], printed: Sequence[Path],
    cwd: Path | None, own_session: bool,
) -> None:  # fmt: skip
    if own_session:
        os.setsid()
    if cwd is not None:
        os.chdir(cwd)
    for number, path in zip((1, 2), printed, strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    # pytest replaces the standard streams and perhaps signal handlers: restore the defaults.
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.FileIO(number, "w", closefd=False), encoding="utf-8")
        for number in (1, 2)
    )
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.exit(main(arguments))
