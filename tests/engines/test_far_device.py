"""Algorithms and runs on a simulated device beside the CPU (see benchmarks/far_device).

The simulated device uses the CPU's kernels, so results have the CPU's bits. A tensor that was left
on the CPU raises an error, as with a GPU.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import far_device
from privssl.algorithms import ALGORITHMS

WHY_NOT = far_device.why_not()
pytestmark = [
    pytest.mark.ci,
    pytest.mark.skipif(WHY_NOT is not None, reason=f"no far device: {WHY_NOT}"),
]


@pytest.fixture(scope="module", params=["some", pytest.param("all", marks=pytest.mark.slow)])
def report(request: pytest.FixtureRequest) -> Any:
    """The report of ``on_far_device.py``: of some algorithms and runs, or of all."""
    program = Path(__file__).parents[1] / "support" / "on_far_device.py"
    done = subprocess.run(
        [sys.executable, str(program), request.param], capture_output=True, text=True, timeout=1800,
        env=os.environ | {
            "PYTHONPATH": os.pathsep.join([str(program.parents[2]), *sys.path]),
            "PRIVSSL_KERNELS": "torch",  # our kernels need the CPU, and round differently
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("how", ["alone", "together"])
def test_every_algorithm_has_the_same_bits_as_on_the_cpu(report: Any, how: str) -> None:
    only_some = report["how much"] == "some"
    everything = {"alone": len(ALGORITHMS), "together": 20}
    assert len(report["played"][how]) >= (2 if only_some else everything[how])
    assert [case for case, equal in report["played"][how].items() if not equal] == []


def test_whole_runs_end_with_the_same_weights_as_on_the_cpu(report: Any) -> None:
    assert report["runs"] == dict.fromkeys(report["runs"], True)
    assert "no privacy" in report["runs"]
    assert "label census" in report["runs"] or report["how much"] == "some"


def test_control_another_seed_gives_other_bits(report: Any) -> None:
    assert not report["another seed"]


def test_operations_across_devices_raise_the_errors_of_a_gpu(report: Any) -> None:
    errors = report["refusals"]
    assert (
        "torch.FloatTensor" in errors["rows stay"] and "should be the same" in errors["rows stay"]
    )
    assert "can't convert far:0" in errors["numpy"]
    for name in errors.keys() - {"rows stay", "numpy"}:
        assert "same device" in errors[name], name


def test_kernels_copies_and_synchronisations_are_counted(report: Any) -> None:
    # counted by hand in ``on_far_device.counted``
    assert report["counted"] == {"kernels": 4, "to": 2, "back": 1, "answers": 1, "waits": 2}


def test_the_simulated_device_ran_the_kernels(report: Any) -> None:
    only_some = report["how much"] == "some"
    assert report["kernels"] > (10_000 if only_some else 100_000)
    assert report["convolutions"] > (100 if only_some else 1_000)
