"""Plant one fault after the other and see who notices: ``python -m tests.planted_faults.run``.

    --only TEXT    faults whose name holds it
    --empirical    also train a tiny run with the fault, and attack it

The tree is copied (what git tracks or would, and compiled kernels) to a temporary folder. There the
tests named must pass without a fault, and fail with it. Exit status 0: all was as the lists say.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.planted_faults.fault import Fault
from tests.planted_faults.private_training import FAULTS

ROOT = Path(__file__).parents[2]
#: Of audit: the verdicts that are not CONSISTENT, by which it says that something is wrong.
VIOLATED, INCONCLUSIVE = 1, 3


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


def status(tree: Path, *words: str) -> tuple[int, str]:
    """Exit status and output of a Python command in a tree."""
    done = subprocess.run(
        [sys.executable, *words], cwd=tree, capture_output=True, text=True, timeout=600,
        env=os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def failing(tree: Path, tests: Sequence[str]) -> list[str]:
    """Those of the tests that fail: 1, and no other status, is a failed test."""
    wrong = []
    for test in tests:
        code, output = status(tree, "-m", "pytest", "-p", "no:cacheprovider", "-qx", test)
        if code not in (0, 1):
            raise SystemExit(f"{test} was not run:\n{output[-2000:]}")
        wrong += [test] if code else []
    return wrong


def attacked(tree: Path, fault: Fault | None) -> str:
    """What the attack says of a run that was trained with the fault."""
    with tempfile.TemporaryDirectory() as folder:
        networks = "F" if fault is None else fault.protect
        code, output = status(
            tree, "-m", "tests.planted_faults.attacked", str(Path(folder, "it")), networks
        )
    said = [line for line in output.splitlines() if line.startswith("violated: ")]
    if code in (VIOLATED, INCONCLUSIVE):
        return f"seen: {said[0][10:] if said else 'inconclusive'}"
    return "not seen" if code == 0 else f"ended with {code}: {output.strip()[-200:]}"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.planted_faults.run")
    parser.add_argument("--only", default="", help="part of a fault's name")
    parser.add_argument("--empirical", action="store_true", help="attack a run with each fault")
    options = parser.parse_args(argv)
    chosen = [fault for fault in FAULTS if options.only in fault.name]
    amiss = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        copied(tree)
        planted = {fault.name: Planted(tree, fault) for fault in chosen}  # none is out of date
        tests = sorted({test for fault in chosen for test in fault.tests})
        code, output = status(tree, "-m", "pytest", "-p", "no:cacheprovider", "-q", *tests)
        if code:
            raise SystemExit(f"tests fail without a fault:\n{output[-4000:]}")
        if options.empirical and (said := attacked(tree, None)) != "not seen":
            raise SystemExit(f"without a fault the attack says: {said}")
        for fault in chosen:
            with planted[fault.name]:
                missed = set(fault.tests) - set(failing(tree, fault.tests))
                said = attacked(tree, fault) if options.empirical else ""
            wrong = bool(missed) or (said != "" and said.startswith("seen") != fault.seen_by_attack)
            amiss += wrong
            told = f"MISSED by {', '.join(sorted(missed))}" if missed else "caught"
            print(f"{'!! ' if wrong else ''}{fault.name} | {told} | {said}", flush=True)
    print(f"{len(chosen) - amiss} of {len(chosen)} as the lists say")
    return 1 if amiss else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
