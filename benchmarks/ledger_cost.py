"""Which share of the training time goes into the privacy account; it should be below 2 %.

    python -m benchmarks.ledger_cost [CONFIG] [section.key=value ...] [--repeats N]

Trains a private config (default: configs/fedssl_dp.yaml) by the training command, in a temporary
folder, and measures inside that run: ``Account.open``, what ``Account.spend`` does before and
after its block (admit, append, fsync, settle), and the epsilon that is asked for in each round.
Numerator and denominator are of one run, so a busy machine slows both. The denominator is the
time of the rounds (``seconds.total`` of results.json); opening the accounts is not in it, and
counts against the account all the same. Three runs; the median counts.

fsync is most of it and depends on the disk: set TMPDIR to measure the disk that runs are on.
Exit status: 0 below the limit, 1 not below it, 2 the config cannot be measured.
"""

import argparse
import contextlib
import io
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import privssl.train as train
from accounting.ledger import Account
from benchmarks.processes import about
from privssl.errors import UserError
from privssl.experiment.config import load_config

LIMIT = 0.02  # of the training seconds
DEFAULT = Path("configs/fedssl_dp.yaml")


class Clock:
    """Seconds spent inside it; what is inside already is not counted twice."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        begun = time.perf_counter()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self.seconds += time.perf_counter() - begun


@dataclass(frozen=True)
class Measured:
    """One run: seconds in accounts, seconds of its rounds, and visits that were charged."""

    account: float
    training: float
    visits: int

    @property
    def share(self) -> float:
        return self.account / self.training


@contextlib.contextmanager
def accounts_on(clock: Clock) -> Iterator[list[Account]]:
    """Inside, the clock runs while an account works. Yields the accounts that were opened."""
    opened: list[Account] = []
    real_open, real_spend = Account.open, Account.spend

    def timed_open(*given: Any, **named: Any) -> Account:
        with clock.running():
            opened.append(real_open(*given, **named))
        return opened[-1]

    @contextlib.contextmanager
    def timed_spend(*given: Any, **named: Any) -> Iterator[None]:
        with contextlib.ExitStack() as paid:
            with clock.running():
                paid.enter_context(real_spend(*given, **named))
            yield
            with clock.running():
                paid.close()

    def timed(method: Callable[..., float]) -> Callable[..., float]:
        def call(*given: Any) -> float:
            with clock.running():
                return method(*given)

        return call

    with contextlib.ExitStack() as patches:
        for name, new in (
            ("open", timed_open),
            ("spend", timed_spend),
            ("spent", timed(Account.spent)),
            ("left", timed(Account.left)),
        ):
            patches.enter_context(patch.object(Account, name, new))
        yield opened


def measure(config: Path, overrides: Sequence[str]) -> Measured | None:
    """Train once. None, with the reason on standard error, when the run does not end well."""
    clock = Clock()
    with (
        tempfile.TemporaryDirectory(prefix="ledger-cost-") as temporary,
        accounts_on(clock) as used,
    ):
        run = Path(temporary) / "run"
        with contextlib.redirect_stdout(io.StringIO()):
            status = train.main([str(config), *overrides, f"run.output={run}", "--quiet"])
        if status != 0:
            return None
        results = json.loads((run / "results.json").read_text())
    training = results["seconds"]["total"]
    return Measured(clock.seconds, training, sum(account.visits() for account in used))


def fsync_seconds(times: int = 20) -> float:
    """Median time in which a line of a file is on the disk of the temporary folder."""
    taken = []
    with tempfile.TemporaryFile(buffering=0) as file:
        for _ in range(times):
            begun = time.perf_counter()
            file.write(b"x" * 500 + b"\n")
            os.fsync(file.fileno())
            taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ledger_cost",
        description="Which share of the training time goes into the privacy account.",
    )
    parser.add_argument("config", nargs="?", type=Path, default=DEFAULT)
    parser.add_argument("overrides", nargs="*", default=[], metavar="section.key=value")
    parser.add_argument("--repeats", type=int, default=3, choices=range(1, 100), metavar="N")
    options = parser.parse_intermixed_args(argv)
    try:
        private = load_config(options.config, options.overrides).privacy is not None
    except UserError as problem:
        print(problem, file=sys.stderr)
        return problem.exit_status
    if not private:
        print(
            f"{options.config}: no privacy section, so there is no account to measure. Give a "
            "config with one",
            file=sys.stderr,
        )
        return 2
    print(f"machine: {about()}; fsync of a line {1e3 * fsync_seconds():.2f} ms")
    shares = []
    for number in range(1, options.repeats + 1):
        found = measure(options.config, options.overrides)
        if found is None:
            return 2
        print(
            f"run {number}: {found.training:.2f} s of training, {1e3 * found.account:.1f} ms in "
            f"accounts for {found.visits} visits: {found.share:.3%}"
        )
        shares.append(found.share)
    median = statistics.median(shares)
    below = median < LIMIT
    print(f"share: {median:.3%} (median), {'below' if below else 'NOT below'} {LIMIT:.0%}")
    return 0 if below else 1


if __name__ == "__main__":
    sys.exit(main())
