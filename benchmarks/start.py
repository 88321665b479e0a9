"""Seconds from the launch of a run to its first round, and what they go into.

    python -m benchmarks.start [CONFIG ...] [--passes 3] [KEY=VALUE ...]

Each run is a new process that does what ``python -m privssl.train CONFIG`` does until its first
round would begin, and there it is interrupted. Prints a Markdown table of medians:

* torch: ``import torch``,
* imports: all others. A private run imports Opacus and scipy; a run with agents of several classes
  matplotlib, for the picture of who holds what,
* work: the rest. Python's own start, config, data, split, networks, noise for a budget, run folder,
  that picture, the first checkpoint, worker processes,
* in all; and the most memory of its processes, MB (PSS).

Passes go through all configs in turn. Files of data lie in the system's cache after the first.
"""

import argparse
import builtins
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.processes import Told, about, at_least, carry_out, tell

CONFIGS = (
    *("configs/fedssl.yaml", "configs/fedssl_dp.yaml", "configs/papers/fedssl_mnist_100_iid.yaml"),
    *("configs/papers/fedssl_dp_mnist_100_iid.yaml", "configs/papers/semifl_mnist_250.yaml"),
)
LIMIT = 120.0  # seconds for one run
BEGIN = "--begin"  # the word by which this module knows the process of a run


def begin(arguments: Sequence[str]) -> int:
    """The run itself, in this process, until its first round."""
    imports = Imports()
    import privssl.train as train

    def first_round(*_: Any) -> None:
        tell(torch=imports.torch, imports=imports.seconds - imports.torch)
        raise KeyboardInterrupt

    imports.then["privssl.runs.round_loop"] = lambda run: setattr(
        run.RoundLoop, "run_rounds", first_round
    )
    return train.main([*arguments, "--quiet"])


class Imports:
    """Seconds that imports take from now on, and those of torch among them.

    ``then``: by the name of a module, what is to be done with it once it is there. The command
    imports when it runs, and what it has not yet imported cannot be changed before.
    """

    def __init__(self) -> None:
        self.seconds = self.torch = 0.0
        self.then: dict[str, Callable[[Any], None]] = {}
        self._real, self._depth = builtins.__import__, 0
        builtins.__import__ = self._timed

    def _timed(self, name: str, *arguments: Any, **named: Any) -> Any:
        is_torch = name.partition(".")[0] == "torch" and "torch" not in sys.modules
        begun, self._depth = time.monotonic(), self._depth + 1
        try:
            return self._real(name, *arguments, **named)
        finally:
            took, self._depth = time.monotonic() - begun, self._depth - 1
            self.torch += took if is_torch else 0.0
            if not self._depth:  # an import's own imports are in it
                self.seconds += took
                for module in self.then.keys() & sys.modules.keys():
                    self.then.pop(module)(sys.modules[module])


def launched(*arguments: str) -> Told:
    """The run in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.start", BEGIN, *arguments]
    return carry_out([command], [{}], limit=LIMIT)


def stages(told: Told) -> dict[str, float]:
    """Seconds by the columns of the table, and MB. Raises RuntimeError where it never began."""
    if not told.lines:
        raise RuntimeError(f"status {told.status}: {told.errors.strip()[-800:]}")
    [line] = told.lines
    total = line["at"] - told.begun
    return {
        "torch": line["torch"],
        "imports": line["imports"],
        "work": total - line["torch"] - line["imports"],
        "in all": total,
        "memory": told.peak_pss,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a Markdown table; 1 where a run did not come to its first round."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.start", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("words", nargs="*", metavar="CONFIG or KEY=VALUE")
    parser.add_argument("--passes", type=at_least(1), default=3)
    options = parser.parse_intermixed_args(arguments)
    overrides = [word for word in options.words if "=" in word]
    configs = [word for word in options.words if "=" not in word] or list(CONFIGS)
    print(f"{about()}\nOne thread for each process, unless OMP_NUM_THREADS says otherwise.")
    found: dict[str, list[dict[str, float]]] = {config: [] for config in configs}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.passes):
            for config in configs:
                output = f"run.output={folder}/{Path(config).stem}-{number}"
                try:
                    found[config].append(stages(launched(config, output, *overrides)))
                except RuntimeError as error:
                    print(f"{config}: {error}", file=sys.stderr)
                    return 1
    print("\n| config | torch, s | imports, s | work, s | in all, s | memory, MB |")
    print("|---" * 6 + "|")
    for config, runs in found.items():
        middle = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        memory = middle.pop("memory")
        print(f"| {config} | {' | '.join(f'{s:.2f}' for s in middle.values())} | {memory:.0f} |")
    return 0


if __name__ == "__main__":
    sys.exit(begin(sys.argv[2:]) if sys.argv[1:2] == [BEGIN] else main())
