"""Run paths, comparisons and signals that test_resume.py shares with other tests."""

import contextlib
import json
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.support import command_line
from tests.support.command_line import Outcome

PLAIN = command_line.PLAIN.replace("rounds: 3", "rounds: 4") + "run: {checkpoint_every: 2}\n"
PRIVATE = PLAIN + "privacy: {epsilon: 4.0, delta: 1.0e-3, sample_rate: 1.0, steps: 2}\n"


def command(*arguments: object) -> Outcome:
    """The training command without a progress bar."""
    return command_line.command(*arguments, "--quiet")


@dataclass(frozen=True)
class RunPaths:
    """A config and the folder of its run."""

    config: Path
    run: Path

    @property
    def output(self) -> str:
        return f"run.output={self.run}"

    def metrics(self) -> bytes:
        return (self.run / "metrics.csv").read_bytes()

    def weights(self) -> Mapping[str, torch.Tensor]:
        return safetensors.torch.load_file(self.run / "classifier.safetensors")

    def results(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.run / "results.json").read_text())
        return found


def place(folder: Path, text: str = PLAIN) -> RunPaths:
    config = folder / "tiny.yaml"
    config.write_text(text)
    return RunPaths(config, folder / "run")


def same_results(one: RunPaths, other: RunPaths) -> bool:
    mine, theirs = one.weights(), other.weights()
    equal = mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine)
    return equal and one.metrics() == other.metrics()


@contextlib.contextmanager
def replaced(owner: Any, name: str, new: Callable[..., Any]) -> Iterator[None]:
    """Replace ``owner.name`` by ``new(original, ...)``."""
    old = getattr(owner, name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, lambda *args, **kwargs: new(old, *args, **kwargs))
        yield


@contextlib.contextmanager
def signals_at_call(
    owner: Any, name: str, call: int, *signals: signal.Signals, late: bool = False
) -> Iterator[None]:
    """Raise signals at the given call of a function: before it, or after its work if ``late``."""
    count = 0

    def wrapped(old: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        result = old(*args, **kwargs) if late or count != call else None
        if count == call:
            for number in signals:
                signal.raise_signal(number)
            return result if late else old(*args, **kwargs)
        return result

    with replaced(owner, name, wrapped):
        yield


def ledgers(at: RunPaths) -> dict[str, Path]:
    return {path.stem: path for path in (at.run / "ledger").glob("*.jsonl")}
