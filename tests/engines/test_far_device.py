"""Everything on a device that is not the CPU, on machines that have no other (see far_device).

The device's kernels are the CPU's. So a run on it has the CPU's bits if it gave the device all of
its work; a tensor that was left behind on the CPU ends it with an error, as a GPU would.
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
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=f"no far device: {WHY_NOT}")


@pytest.fixture(scope="module", params=["some", pytest.param("all", marks=pytest.mark.slow)])
def seen(request: pytest.FixtureRequest) -> Any:
    """What ``on_far_device.py`` saw: of some algorithms and runs, or of all."""
    program = Path(__file__).parents[1] / "support" / "on_far_device.py"
    done = subprocess.run(
        [sys.executable, str(program), request.param], capture_output=True, text=True, timeout=450,
        env=os.environ | {
            "PYTHONPATH": os.pathsep.join([str(program.parents[2]), *sys.path]),
            "PRIVSSL_KERNELS": "torch",  # ours are for the CPU alone, and round differently
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("how", ["alone", "together"])
def test_every_method_has_the_same_bits_as_on_the_cpu(seen: Any, how: str) -> None:
    some = seen["how much"] == "some"
    everything = {"alone": len(ALGORITHMS), "together": 20}
    assert len(seen["played"][how]) >= (2 if some else everything[how])
    assert [case for case, equal in seen["played"][how].items() if not equal] == []


def test_runs_with_all_that_belongs_to_them_leave_the_same_weights(seen: Any) -> None:
    assert seen["runs"] == dict.fromkeys(seen["runs"], True)
    assert "no privacy" in seen["runs"]
    assert "label census" in seen["runs"] or seen["how much"] == "some"


def test_other_work_has_other_bits(seen: Any) -> None:
    assert not seen["another seed"]


def test_what_a_gpu_refuses_is_refused(seen: Any) -> None:
    said = seen["refusals"]
    assert "torch.FloatTensor" in said["rows stay"] and "should be the same" in said["rows stay"]
    assert "can't convert far:0" in said["numpy"]
    for name in said.keys() - {"rows stay", "numpy"}:
        assert "same device" in said[name], name


def test_what_is_asked_for_is_counted(seen: Any) -> None:
    # by hand, in ``on_far_device.counted``
    assert seen["counted"] == {"kernels": 4, "to": 2, "back": 1, "answers": 1, "waits": 2}


def test_the_device_has_done_the_work(seen: Any) -> None:
    some = seen["how much"] == "some"
    assert seen["kernels"] > (10_000 if some else 100_000)
    assert seen["convolutions"] > (100 if some else 1_000)
