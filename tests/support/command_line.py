"""The training command, run in this process with its output captured.

Not a test itself; test_train_command.py and test_resume.py import it.
"""

import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import privssl.train as train

#: A run of about a second that uses every part of a run.
PLAIN = """\
data: {name: toy, labelled: 40, unlabelled: 80}
agents: {support: 2, query: 2}
model: {name: small_cnn, width: 4}
algorithm:
  name: fedssl
  rounds: 3
  local_steps: 2
  batch_size: 8
  generator_width: 4
  warm_up: 1
"""


@dataclass(frozen=True)
class Outcome:
    """How the command ended and what it printed."""

    status: int
    out: str
    err: str


def run_main(main: Callable[[list[str]], int], *arguments: object) -> Outcome:
    """Run the ``main`` of a command with these arguments."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main([str(argument) for argument in arguments])
    return Outcome(status, out.getvalue(), err.getvalue())


def command(*arguments: object) -> Outcome:
    """Run ``python -m privssl.train`` with these arguments."""
    return run_main(train.main, *arguments)


def assert_refused(outcome: Outcome, *fragments: str) -> None:
    """Assert exit status 2, an error with these texts, no standard output and no traceback."""
    assert outcome.status == 2, outcome
    assert outcome.out == "", outcome
    assert "Traceback" not in outcome.err, outcome
    for fragment in fragments:
        assert fragment in outcome.err, outcome.err


def tree(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Content and modification time of every file, to check that nothing was changed."""
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
