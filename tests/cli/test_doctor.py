"""``privssl doctor`` reports each fault with advice, and writes no file.

Each fault has a control: the same check without it.
"""

import json
import os
import resource
import shutil
import sys
import time
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from privssl import __version__, doctor, installation
from privssl.errors import PrivacyError
from privssl.installation import computing, machine, software
from privssl.installation.finding import Finding, run_checks
from privssl.ops import dispatch, precision, self_test
from tests.support.command_line import tree


def finding_named(findings: Iterable[Finding], name: str) -> Finding:
    """The finding with this name."""
    return next(finding for finding in findings if finding.name == name)


def test_the_doctor_prints_a_status_per_finding_with_advice_and_writes_no_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PRIVSSL_DATA", str(tmp_path / "data"))
    status = doctor.main([])
    out, err = capsys.readouterr()
    lines = [line for line in out.splitlines() if not line.startswith("  ")]
    assert {line.split()[0] for line in lines[:-1]} <= {"ok", "note", "problem"}
    for name in (
        *("Python", "privssl", "torch", "numpy", "cores", "threads", "kernels", "bfloat16", "GPU"),
        *("data digits", "data svhn", "disk of runs", "/dev/shm", "flwr"),
    ):
        assert any(line.split(maxsplit=1)[1].startswith(f"{name}:") for line in lines), name
    assert err == ""
    assert list(tmp_path.iterdir()) == []
    assert status == (1 if any(line.startswith("problem") for line in lines) else 0)


def test_doctor_json_has_the_same_findings_and_the_exit_status_reports_problems(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [Finding("a", "ok", "fine"), Finding("b", "note", "slow", "Buy.")]
    monkeypatch.setattr(doctor, "find", lambda: found)
    assert doctor.main(["--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is True
    assert told["checks"][1] == {"name": "b", "status": "note", "text": "slow", "advice": "Buy."}
    found.append(Finding("c", "problem", "broken", "Mend."))
    assert doctor.main(["--json"]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False
    with pytest.raises(SystemExit) as mistake:
        doctor.main(["--jsn"])
    assert mistake.value.code == 2


def test_a_check_that_raises_is_a_problem_and_other_checks_still_run() -> None:
    def check_wires() -> list[Finding]:
        raise OSError("libcudart.so.12: cannot open shared object file")

    def check_rest() -> list[Finding]:
        return [Finding("rest", "ok", "fine")]

    broken, rest = run_checks([check_wires, check_rest])
    assert (broken.name, broken.status, rest.status) == ("wires", "problem", "ok")
    assert "libcudart" in broken.text and broken.advice


def test_a_torch_that_cannot_be_imported_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(installation, "computing")
    monkeypatch.setitem(sys.modules, "privssl.installation.computing", None)  # its import fails
    [broken] = run_checks([doctor.check_torch])
    assert (broken.name, broken.status) == ("torch", "problem")


def test_a_missing_required_package_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("privssl.runtime.command", "rich", "rich.console"):
        monkeypatch.setitem(sys.modules, name, None)
    assert doctor.main([]) == 1
    assert "problem: " in capsys.readouterr().err


def test_package_versions_are_compared_with_our_ranges_and_with_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    versions = {"torch": "2.6.0", "torchvision": "0.21.0", "numpy": "2.0"}
    needs = {
        "privssl": ["torch>=2.6", "torchvision>=0.21", "numpy>=1.26", 'x>=9; extra == "x"'],
        "torchvision": ["torch==2.6.0", "numpy"],
        "torch": ["filelock"],
    }

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(metadata, "requires", lambda name: needs.get(name))
    assert [f.status for f in software.check_packages()] == ["ok"] * 3  # the control

    versions["torch"] = "2.6.0+cpu"  # no other version
    assert [f.status for f in software.check_packages()] == ["ok"] * 3
    versions["torch"] = "2.7.1"  # a version that torchvision does not support
    clash = finding_named(software.check_packages(), "torchvision")
    assert clash.status == "problem"
    assert "made for torch==2.6.0, and 2.7.1 is installed" in clash.text
    versions["torch"] = "2.5"
    assert "needed: torch>=2.6" in finding_named(software.check_packages(), "torch").text
    del versions["torch"]
    assert finding_named(software.check_packages(), "torch").text.startswith("absent")


def test_an_imported_privssl_other_than_the_installed_one_is_a_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: __version__)
    assert finding_named(software.check_python(), "privssl").status == "ok"
    monkeypatch.setattr(metadata, "version", lambda name: "0.1.0")
    other = finding_named(software.check_python(), "privssl")
    assert (other.status, "0.1.0 is installed" in other.text) == ("problem", True)


def test_a_flower_of_another_version_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "requires", lambda _: ['flwr==1.42.*; extra == "flower"'])
    monkeypatch.setattr(metadata, "version", lambda _: "1.42.3")
    assert finding_named(software.check_optional_packages(), "flwr").status == "ok"
    monkeypatch.setattr(metadata, "version", lambda _: "1.50.0")
    assert finding_named(software.check_optional_packages(), "flwr").status == "problem"


@pytest.mark.parametrize(
    ("value", "status"),
    [(None, "ok"), ("1", "ok"), ("2", "note"), ("4,2", "note"), ("many", "problem"),
     ("0", "problem"), ("", "problem")],
)  # fmt: skip
def test_the_thread_check_follows_omp_num_threads(value: str | None, status: str) -> None:
    environment = {} if value is None else {"OMP_NUM_THREADS": value}
    found = finding_named(machine.check_threads(environment), "threads")
    assert found.status == status
    assert bool(found.advice) == (status != "ok")


def test_an_active_omp_wait_policy_is_noted() -> None:
    assert finding_named(machine.check_threads({}), "waiting threads").status == "note"
    environment = {"OMP_WAIT_POLICY": "passive"}
    assert finding_named(machine.check_threads(environment), "waiting threads").status == "ok"


def test_container_cores_are_read_from_cgroup_version_1_and_2(tmp_path: Path) -> None:
    assert machine.container_cores(tmp_path) is None
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert machine.container_cores(tmp_path) is None
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert machine.container_cores(tmp_path) == 1.5
    (tmp_path / "cpu.max").unlink()
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
    assert machine.container_cores(tmp_path) is None
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("50000\n")
    assert machine.container_cores(tmp_path) == 0.5


def test_fewer_container_cores_than_usable_cores_are_noted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: 8)
    monkeypatch.setattr(machine, "container_cores", lambda: 2.0)
    [found] = machine.check_cores()
    assert (found.status, "run.workers=2" in found.advice) == ("note", True)
    monkeypatch.setattr(machine, "container_cores", lambda: 8.0)
    [found] = machine.check_cores()
    assert found.status == "ok"


@pytest.mark.parametrize(("free", "status"), [(2**40, "ok"), (2**29, "note"), (2**20, "problem")])
def test_the_disk_check_follows_the_free_space(
    free: int, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    usage = SimpleNamespace(free=free, total=2**40, used=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage)
    assert finding_named(machine.check_disk(), "disk of runs").status == status


def test_unwritable_folders_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert not any(f.name == "temporary files" for f in machine.check_disk())  # the control
    monkeypatch.setenv("TMPDIR", str(tmp_path / "absent"))
    assert finding_named(machine.check_disk(), "temporary files").status == "note"
    (tmp_path / "runs").write_text("")
    assert "is no folder" in finding_named(machine.check_disk(), "disk of runs").text
    (tmp_path / "runs").unlink()
    monkeypatch.setattr(os, "access", lambda place, mode: False)
    assert finding_named(machine.check_disk(), "disk of runs").status == "problem"


def test_an_unknown_home_folder_is_a_problem_that_names_the_variable_to_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PRIVSSL_DATA", "~nobody-has-this-name/data")
    found = finding_named(machine.check_disk(), "disk of data sets")
    assert (found.status, "PRIVSSL_DATA" in found.advice) == ("problem", True)
    assert [f.name for f in computing.check_data_sets()] == ["data digits"]


def test_a_low_limit_of_open_files_and_little_memory_are_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4096, 4096))
    assert finding_named(machine.check_memory(), "open files").status == "ok"
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 4096))
    assert finding_named(machine.check_memory(), "open files").status == "problem"
    monkeypatch.setattr(machine, "_read_available_memory", lambda: 2**28)
    assert finding_named(machine.check_memory(), "memory").status == "note"


def test_an_ascii_output_and_a_wrong_clock_are_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(encoding="UTF-8"))
    text, clock = machine.check_text_and_clock()
    assert (text.status, clock.status) == ("ok", "ok")
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(encoding="ascii"))
    monkeypatch.setattr(time, "time", lambda: 0.0)
    text, clock = machine.check_text_and_clock()
    assert (text.status, clock.status) == ("note", "problem")


def test_absent_and_wrong_kernels_are_reported_with_their_cost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatch, "instruction_set", lambda: "avx2")
    monkeypatch.setattr(self_test, "refuse_wrong_kernels", lambda: None)
    [found] = computing.check_kernels()
    assert (found.status, found.text[:4]) == ("ok", "avx2")

    def raise_wrong_kernel() -> None:
        raise PrivacyError("privssl's kernel that draws noise computes a wrong result")

    monkeypatch.setattr(self_test, "refuse_wrong_kernels", raise_wrong_kernel)
    [found] = computing.check_kernels()
    assert (found.status, "PRIVSSL_KERNELS=torch" in found.advice) == ("problem", True)

    monkeypatch.setattr(dispatch, "instruction_set", lambda: None)
    monkeypatch.setattr(dispatch, "INSTRUCTION_SETS", {"avx2": lambda: True})
    [found] = computing.check_kernels()
    assert (found.status, "C++ compiler" in found.advice) == ("note", True)
    assert "twice as long" in found.text
    monkeypatch.setenv("PRIVSSL_KERNELS", "torch")
    [found] = computing.check_kernels()
    assert found.text.startswith("switched off")


def test_a_processor_without_bfloat16_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    for there, status in ((True, "ok"), (False, "note")):
        monkeypatch.setattr(precision, "has_instructions", lambda there=there: there)
        [found] = computing.check_bfloat16()
        assert found.status == status


def test_a_gpu_is_reported_with_its_measured_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(computing, "DRIVERS", (str(tmp_path / "gpu0"),))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "GPU X")
    [found] = computing.check_gpu(tmp_path)
    assert (found.status, found.text) == ("ok", "none seen by torch: runs take the processor")

    (tmp_path / "gpu0").touch()  # a driver is installed, but torch does not find the GPU
    [found] = computing.check_gpu(tmp_path)
    assert (found.status, "built for" in found.text) == ("problem", True)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    [found] = computing.check_gpu(tmp_path)
    assert (found.status, "no GPU was ever measured" in found.text) == ("note", True)

    (tmp_path / "results/gpu").mkdir(parents=True)
    (tmp_path / "results/gpu/tried.json").write_text('{"gpu": "GPU X", "small": true}')
    [found] = computing.check_gpu(tmp_path)
    assert "no GPU was ever measured" in found.text

    (tmp_path / "results/gpu/x.json").write_text('{"gpu": "GPU X", "small": false}')
    (tmp_path / "results/gpu/damaged.json").write_text("{")
    [found] = computing.check_gpu(tmp_path)
    assert (found.status, found.text) == ("ok", "GPU X; measured on GPU X")


def test_data_sets_are_searched_in_the_folders_of_runs_and_not_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRIVSSL_DATA", str(tmp_path))
    for name in ("train", "test"):
        (tmp_path / f"{name}_32x32.mat").touch()
    before = tree(tmp_path)
    found = list(computing.check_data_sets())
    assert (
        finding_named(found, "data svhn").status,
        finding_named(found, "data digits").status,
    ) == ("ok", "ok")
    absent = finding_named(found, "data mnist")
    assert (absent.status, str(tmp_path) in absent.text) == ("note", True)
    assert "torchvision.datasets.MNIST" in absent.advice
    (tmp_path / "test_32x32.mat").unlink()
    assert "1 of 2 files are absent" in finding_named(computing.check_data_sets(), "data svhn").text
    assert set(tree(tmp_path)) < set(before)
