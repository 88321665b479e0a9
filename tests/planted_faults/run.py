"""Plant one fault after the other and see who notices: ``python -m tests.planted_faults.run``.

    --only TEXT    faults whose name or files hold it
    --jobs N       so many at a time, each in a tree of its own
    --empirical    instead of tests: train a tiny run with the fault, and attack it

The tree is copied (what git tracks or would, and compiled kernels) to a temporary folder. There the
tests named must pass without a fault, and fail with it; an attack must find nothing without one.
Exit status 0: every fault was caught (--empirical: seen or not, as its list says).
"""

import argparse
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from pathlib import Path

import opacus.optimizers  # noqa: F401  takes seconds, and no fork has to do it again
import pytest
import scipy.stats  # noqa: F401
import torch.func  # noqa: F401

from tests.planted_faults import FAULTS
from tests.planted_faults.fault import ROOT, Fault, StaleFaultError

OURS = ("privssl", "accounting", "generators", "tests", "conftest")
#: Of audit: the verdicts that are not CONSISTENT, by which it says that something is wrong.
VIOLATED, INCONCLUSIVE = 1, 3
FAILED = 1  # of pytest: all were run, and one failed
HANGS = 600  # seconds after which a test counts as failed

_tree: Path  # of this process


def copy_tree(to: Path) -> None:
    """The working tree."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split("\0")  # fmt: skip
    kernels = [str(path.relative_to(ROOT)) for path in ROOT.glob("privssl/**/*.so")]
    for name in filter(None, [*listed, *kernels]):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, to / name)


def enter_tree(folder: str) -> None:
    """Give this process a copy of the tree."""
    global _tree
    _tree = Path(tempfile.mkdtemp(dir=folder))
    copy_tree(_tree)


@contextmanager
def planted(fault: Fault) -> Iterator[None]:
    """Inside, the tree has the fault."""
    before, after = fault.sources(_tree)
    try:
        _write(after)
        yield
    finally:
        _write(before)


def _write(files: dict[str, str]) -> None:
    for name, text in files.items():
        path = _tree / name
        path.write_text(text, encoding="utf-8")
        for old in path.parent.glob(f"__pycache__/{path.stem}.*"):  # one second is one time
            old.unlink()


def fork(work: Callable[[], int], *, seconds: int = 0) -> tuple[int, str]:
    """Exit status and output of something done in the tree, by a fork of this process.

    Other people's packages, slow to import, are there; ours are imported anew. 0 seconds: no end.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        if not (child := os.fork()):
            signal.alarm(seconds)
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            for name in [n for n in sys.modules if n.split(".")[0] in OURS]:
                del sys.modules[name]
            os.chdir(_tree)
            sys.path.insert(0, str(_tree))
            # CI: hypothesis tries the same examples every time.
            os.environ |= {"PYTHONPATH": str(_tree), "CI": "1"}
            code = 70  # of an exception
            try:
                code = work()
            except BaseException:
                traceback.print_exc()
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(code)
        _, ended = os.waitpid(child, 0)
        output.seek(0)
        return os.waitstatus_to_exitcode(ended), output.read()


def run_tests(tests: Sequence[str], *, seconds: int = 0) -> tuple[int, str]:
    command = ["-p", "no:cacheprovider", "-q", "-m", "not slow and not flower", *tests]
    return fork(lambda: int(pytest.main(command)), seconds=seconds)


def without_fault(tests: Sequence[str]) -> str:
    """What pytest says if one of the tests fails in a tree without a fault; else nothing."""
    code, output = run_tests(tests)
    return output[-4000:] if code else ""


def try_fault(fault: Fault) -> tuple[bool, str]:
    """Whether all tests of a fault fail with it, and what to print."""
    try:
        with planted(fault):
            for test in fault.tests:
                code, output = run_tests([test], seconds=HANGS)
                if code == 0:
                    return False, f"MISSED by {test}"
                if code not in (FAILED, -signal.SIGALRM):
                    return False, f"NOT RUN: {test} ended with {code}\n{output[-2000:]}"
    except StaleFaultError as error:
        return False, f"STALE TEXT: {error}"
    return True, "caught by " + ", ".join(test.rpartition("::")[2] for test in fault.tests)


def attack(protect: str) -> str:
    """What the attack says of a run that was trained in the tree; nothing, if it sees nothing."""

    def work() -> int:
        from tests.planted_faults.attacked import main

        return main(Path(folder, "it"), protect)

    with tempfile.TemporaryDirectory() as folder:
        code, output = fork(work)
    said = [line[10:] for line in output.splitlines() if line.startswith("violated: ")]
    if code in (VIOLATED, INCONCLUSIVE):
        return f"seen: {said[0] if said else 'inconclusive'}"
    return f"ended with {code}: {output.strip()[-200:]}" if code else ""


def attack_fault(fault: Fault) -> tuple[bool, str]:
    """Whether an attack sees what the fault's list says, and what to print."""
    with planted(fault):
        said = attack(fault.protect) or "not seen"
    return said.startswith("seen") == fault.seen_by_attack, said


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.planted_faults.run")
    parser.add_argument("--only", default="", metavar="TEXT", help="part of a name or a path")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="faults at a time")
    parser.add_argument("--empirical", action="store_true", help="attack a run with each fault")
    options = parser.parse_args(argv)
    chosen = [
        fault for fault in FAULTS
        if any(options.only in text for text in (fault.name, *(path for path, _, _ in fault.edits)))
        and not (options.empirical and fault.seen_by_attack is None)
    ]  # fmt: skip
    if not chosen:
        parser.error(f"no fault has {options.only!r} in its name or path")
    begun, wrong = time.monotonic(), 0
    tests = sorted({test for fault in chosen for test in fault.tests})
    groups = [tuple(some) for _, some in groupby(tests, lambda test: test.partition("::")[0])]
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(
            options.jobs, multiprocessing.get_context("fork"), enter_tree, (folder,)
        ) as pool,
    ):
        control = partial(pool.map, without_fault, groups)
        if options.empirical:
            control = partial(pool.map, attack, ["F"])
        if amiss := "\n".join(filter(None, control())):
            raise SystemExit(f"without a fault: {amiss}")
        print(f"Without a fault all is well ({time.monotonic() - begun:.0f} s)", flush=True)
        judged = pool.map(attack_fault if options.empirical else try_fault, chosen)
        for fault, (right, said) in zip(chosen, judged, strict=True):
            wrong += not right
            print(f"{'  ' if right else '!!'} {fault.name} | {said}", flush=True)
    asked = "as the lists say" if options.empirical else "caught"
    print(f"{len(chosen) - wrong} of {len(chosen)} {asked}, {time.monotonic() - begun:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
