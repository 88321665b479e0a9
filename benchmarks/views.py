"""What random views of rows take of a round.

    python -m benchmarks.views CONFIG... [--rounds 3] [--phase NAME] [KEY=VALUE ...]

Plays the first rounds of each config in this process, as ``benchmarks.rounds`` does, and prints the
share of their time that was spent in views: shifts, turns and cuts (``data/affine_augment.py``) and
RandAugment. Turning stored rows into networks' inputs is not in it.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.processes import about, at_least, configs_of
from benchmarks.rounds import of_rounds
from privssl.data.affine_augment import Augmentation
from privssl.data.rand_augment import RandAugment
from privssl.errors import UserError
from privssl.runtime.process import tune_malloc


@contextmanager
def timed() -> Iterator[list[float]]:
    """Inside, the seconds of each view that is made are added to the list."""
    seen: list[float] = []

    def timing(call: Any) -> Any:
        @wraps(call)
        def timed_call(*given: Any) -> Any:
            begun = time.perf_counter()
            view = call(*given)
            seen.append(time.perf_counter() - begun)
            return view

        return timed_call

    with ExitStack() as stack:
        for kind in (Augmentation, RandAugment):
            stack.enter_context(patch.object(kind, "__call__", timing(kind.__call__)))
        yield seen


def shares(path: Path, overrides: Sequence[str], rounds: int, phase: str) -> Any:
    """Seconds of a round in the mean, and of its views, (2,)."""
    with timed() as seen:

        def clock() -> Any:
            return np.array([time.perf_counter(), sum(seen)])

        return np.mean(of_rounds(path, [*overrides, "run.workers=1"], rounds, phase, clock), axis=0)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 0, or 2 where a config cannot be measured."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.views", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("configs", nargs="+", help="files, and overrides of all of them")
    parser.add_argument("--rounds", type=at_least(1), default=3)
    parser.add_argument("--phase", default="")
    options = parser.parse_intermixed_args(arguments)
    configs, overrides = configs_of(parser, options.configs)
    torch.set_num_threads(1)
    tune_malloc()
    print(f"{about()}\nOne thread.\n\n| config | a round, s | views, % |\n|---|---|---|")
    for name in configs:
        try:
            whole, views = shares(Path(name), overrides, options.rounds, options.phase)
        except UserError as error:
            print(error, file=sys.stderr)
            return 2
        print(f"| {Path(name).stem} | {whole:.2f} | {100 * views / whole:.1f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
