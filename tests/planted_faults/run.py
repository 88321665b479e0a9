"""Plant one fault after the other and see who notices: ``python -m tests.planted_faults.run``.

    --only TEXT    faults whose name holds it
    --empirical    instead of tests: train a tiny run with the fault, and attack it

The tree is copied (what git tracks or would, and compiled kernels) to a temporary folder. There the
tests named must pass without a fault, and fail with it; an attack must find nothing without one.
Exit status 0: all was as the lists say.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import opacus.optimizers  # noqa: F401  takes seconds, and no fork has to do it again
import pytest
import scipy.stats  # noqa: F401
import torch.func  # noqa: F401

from .fault import Fault  # noqa: TID252  tests is no package
from .private_training import FAULTS  # noqa: TID252  tests is no package

ROOT = Path(__file__).parents[2]
OURS = ("privssl", "accounting", "generators", "tests", "conftest", "toy_worlds")
#: Of audit: the verdicts that are not CONSISTENT, by which it says that something is wrong.
VIOLATED, INCONCLUSIVE = 1, 3
FAILED = 1  # of pytest: all were run, and one failed


def copied(to: Path) -> None:
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


class Planted:
    """The files of a tree with a fault's edits; as they were, afterwards."""

    def __init__(self, tree: Path, fault: Fault) -> None:
        self._before = {path: (tree / path).read_text() for path, _, _ in fault.edits}
        self._tree, self._after = tree, dict(self._before)
        for path, old, new in fault.edits:
            if self._after[path].count(old) != 1 or old == new:
                raise SystemExit(f"{fault.name}: {path} has not once\n{old}")
            self._after[path] = self._after[path].replace(old, new)

    def __enter__(self) -> None:
        self._write(self._after)

    def __exit__(self, *_: object) -> None:
        self._write(self._before)

    def _write(self, files: dict[str, str]) -> None:
        for name, text in files.items():
            path = self._tree / name
            path.write_text(text)
            for old in path.parent.glob(f"__pycache__/{path.stem}.*"):  # one second is one time
                old.unlink()


def status(tree: Path, work: Callable[[], int]) -> tuple[int, str]:
    """Exit status and output of something done in a tree, by a fork of this process.

    Other people's packages, which take seconds to import, are there; ours are imported anew.
    """
    with tempfile.TemporaryFile("w+") as output:
        if not (child := os.fork()):
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            for name in [n for n in sys.modules if n.split(".")[0] in OURS]:
                del sys.modules[name]
            os.chdir(tree)
            sys.path.insert(0, str(tree))
            os.environ["PYTHONPATH"] = str(tree)
            code = 70  # of an exception
            try:
                code = work()
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        _, ended = os.waitpid(child, 0)
        output.seek(0)
        return os.waitstatus_to_exitcode(ended), output.read()


def tested(tree: Path, tests: Sequence[str]) -> tuple[int, str]:
    return status(tree, lambda: int(pytest.main(["-p", "no:cacheprovider", "-q", *tests])))


def by_tests(tree: Path, tests: Sequence[str]) -> list[str]:
    """Those of the tests that fail."""
    wrong = []
    for test in tests:
        code, output = tested(tree, [test])
        if code not in (0, FAILED):
            raise SystemExit(f"{test} was not run:\n{output[-2000:]}")
        wrong += [test] if code else []
    return wrong


def all_failing(tree: Path, faults: Sequence[Fault]) -> str:
    """What pytest says, if any test of these faults fails in a tree without them; else nothing."""
    tests = sorted({test for fault in faults for test in fault.tests})
    code, output = tested(tree, tests)
    return output[-4000:] if code else ""


def by_attack(tree: Path, protect: str) -> str:
    """What the attack says of a run that was trained in the tree; nothing, if it sees nothing."""

    def work() -> int:
        from .attacked import main  # noqa: TID252  tests is no package

        return main(Path(folder, "it"), protect)

    with tempfile.TemporaryDirectory() as folder:
        code, output = status(tree, work)
    said = [line[10:] for line in output.splitlines() if line.startswith("violated: ")]
    if code in (VIOLATED, INCONCLUSIVE):
        return f"seen: {said[0] if said else 'inconclusive'}"
    return f"ended with {code}: {output.strip()[-200:]}" if code else ""


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.planted_faults.run")
    parser.add_argument("--only", default="", help="part of a fault's name")
    parser.add_argument("--empirical", action="store_true", help="attack a run with each fault")
    options = parser.parse_args(argv)
    chosen = [fault for fault in FAULTS if options.only in fault.name]
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        copied(tree)
        planted = {fault.name: Planted(tree, fault) for fault in chosen}  # none is out of date
        if amiss := (by_attack(tree, "F") if options.empirical else all_failing(tree, chosen)):
            raise SystemExit(f"without a fault: {amiss}")
        wrong = 0
        for fault in chosen:
            with planted[fault.name]:
                if options.empirical:
                    said = by_attack(tree, fault.protect) or "not seen"
                    right = said.startswith("seen") == fault.seen_by_attack
                else:
                    missing = set(fault.tests) - set(by_tests(tree, fault.tests))
                    right, said = not missing, f"missed by {missing}" if missing else "caught"
            wrong += not right
            print(f"{'' if right else '!! '}{fault.name} | {said}", flush=True)
    print(f"{len(chosen) - wrong} of {len(chosen)} as the lists say")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
