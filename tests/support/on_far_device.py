"""The program of ``test_far_device.py``, which needs a process of its own for the simulated device.

Run everything, or ``some`` of it, on the CPU and on the simulated device. Print as JSON which
results were equal.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

import privssl.train as train
from accounting import discrete_laplace
from benchmarks import far_device
from privssl.algorithms import ALGORITHMS
from privssl.core.agents import Agent
from privssl.engines import batched
from privssl.engines.batched import BatchedEngine
from privssl.engines.local import LocalEngine
from privssl.experiment import prepare
from privssl.training import local_training
from tests.support.algorithm_contract import CASES, algorithm, rows_of
from tests.support.costs import SMALL, costs_set_to
from tests.support.toy_worlds import federated_data, same_bits, simulate

CPU = torch.device("cpu")
CONFIGS = Path(__file__).parents[2] / "configs"
SHORT = ["agents.query=2", "algorithm.rounds=2", "algorithm.warm_up=1", "algorithm.local_steps=2"]
#: Whole runs: a config, and arguments that make it short. DP-SGD is absent: it needs the CPU.
RUNS = {
    "no privacy": ("fedssl", SHORT),
    "label census": (
        "label_census",
        ["agents.query=2", "algorithm.vote_rounds=1", "algorithm.self_training_rounds=1"],
    ),
}  # fmt: skip

#: A selection of cases that use a device in different ways.
SOME: Mapping[str, Collection[str]] = {
    "alone": ("fedmatch", "label_census"),
    "together": ("fedssl, gate open", "fedmatch_mixup"),
    "runs": ("no privacy",),
}


def rounds(case: str, device: torch.device, *, together: bool, seed: int = 0) -> Any:
    """Simulate a few rounds; return state and memories."""
    ours = algorithm(case)

    def engine(agents: Sequence[Agent], **how: Any) -> LocalEngine:
        how["device"] = device
        if together:
            return BatchedEngine(agents, algorithm=ours, at_once=8, **how)
        return LocalEngine(agents, **how)

    after = simulate(ours, federated_data(dataset=rows_of(case)), engine=engine, seed=seed)
    return {"state": vars(after.state), "memories": after.engine.memories()}


def run(name: str, device: torch.device, folder: str) -> bytes:
    """Run the training command with fixed noise; return the file of weights."""
    config, short = RUNS[name]
    output = Path(folder, f"{name} {device}".replace(" ", "-"))
    arguments = [str(CONFIGS / f"{config}.yaml"), *short]
    generator = np.random.default_rng(0)

    def words(count: int) -> np.ndarray:
        return generator.integers(2**64, size=count, dtype=np.uint64)

    with (
        patch.object(prepare, "device_of_run", lambda config: device),
        patch.object(discrete_laplace, "random_uint64", words),
        costs_set_to(SMALL),
    ):
        status = train.main([*arguments, f"run.output={output}", "run.workers=1"])
    assert status == 0, status
    return (output / "classifier.safetensors").read_bytes()


def refusals(far: torch.device) -> dict[str, str]:
    """The errors of operations on tensors of two devices, and of impossible conversions."""
    x, y = torch.rand(3, 3).to(far), torch.rand(3, 3)
    real = local_training.network_input

    def rows_stay() -> None:
        with patch.object(local_training, "network_input", lambda x, device="cpu": real(x)):
            rounds("fedavg", far, together=False)

    attempts: dict[str, Callable[[], object]] = {
        "rows stay": rows_stay,
        "added": lambda: x + y,
        "picked": lambda: x.gather(1, y.long()),
        "masked": lambda: x.masked_fill(y > 0.5, 0.0),
        "listed": lambda: torch._foreach_add_([x], [y]),
        "into the cpu": lambda: y.index_add(0, torch.arange(3).to(far), y),
        "numpy": x.numpy,
    }
    said = {}
    for name, attempt in attempts.items():
        try:
            attempt()
            said[name] = "nothing"
        except (RuntimeError, TypeError) as error:
            said[name] = str(error)
    return said


def counted(far: torch.device) -> dict[str, int]:
    """The counts of a computation whose kernels and copies are counted by hand."""
    far_device.asked()
    x = torch.ones(2, 2).to(far)  # a copy
    total = ((x + x) @ x).sum()  # three kernels
    whole = x[torch.tensor([0])].view(2)  # a copy of row numbers, a kernel
    assert float(total) == 16.0 and float(whole.cpu()[0]) == 1.0  # an answer; a copy back
    seen = far_device.asked()
    return {n: getattr(seen, n) for n in ("kernels", "to", "back", "answers", "waits")}


def main() -> None:
    torch.set_num_threads(1)
    how_much = sys.argv[1]
    batching = [case for case, (name, _) in CASES.items() if name in batched.ALGORITHMS]
    everything = {"alone": list(ALGORITHMS), "together": batching, "runs": list(RUNS)}
    some: Mapping[str, Collection[str]] = SOME if how_much == "some" else everything
    far = far_device.begin()
    played = {
        how: {
            case: same_bits(
                rounds(case, CPU, together=together), rounds(case, far, together=together)
            )
            for case in some[how]
        }
        # alone: one agent at a time; together: batched agents
        for how, together in (("alone", False), ("together", True))
    }
    asked = far_device.asked()
    with tempfile.TemporaryDirectory() as folder:
        runs = {name: run(name, CPU, folder) == run(name, far, folder) for name in some["runs"]}
    other = same_bits(
        rounds("fedavg", CPU, together=False), rounds("fedavg", far, together=False, seed=1)
    )
    seen = {
        "how much": how_much, "played": played, "runs": runs, "another seed": other,
        "refusals": refusals(far), "counted": counted(far),
        "kernels": asked.kernels, "convolutions": asked.by_name["aten::convolution"],
    }  # fmt: skip
    print("\n" + json.dumps(seen))


if __name__ == "__main__":
    main()
