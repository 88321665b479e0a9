"""Charges, registered rows and saved files are durable before they are used.

Tests cannot cut the power, so they check the order of system calls: fsync of the whole file, then
the rename, then fsync of the folder.
"""

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from accounting import row_registry
from accounting.budget import Budget
from accounting.events import PoissonSampledGaussianEvent
from accounting.ledger import Account, AccountPlan
from privssl.runs import checkpoint
from privssl.runs.checkpoint import Snapshot
from privssl.storage import atomic_files
from tests.support import command_line

VISIT = PoissonSampledGaussianEvent(noise_multiplier=8.0, sample_rate=1.0, steps=5)


class CallRecorder:
    """Records calls as (kind, name): file size or "folder" for fsync, "named" for renames."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[Any, str]] = []
        fsync, replace, rename = os.fsync, os.replace, Path.rename

        def record_fsync(descriptor: int) -> None:
            found, path = os.fstat(descriptor), Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            what = "folder" if stat.S_ISDIR(found.st_mode) else found.st_size
            self.calls.append((what, path.name))
            fsync(descriptor)

        def record_replace(source: Any, target: Any, **how: Any) -> None:
            self.calls.append(("named", Path(target).name))
            replace(source, target, **how)

        def record_rename(self_: Path, target: Path) -> Path:
            self.calls.append(("named", target.name))
            return rename(self_, target)

        monkeypatch.setattr(os, "fsync", record_fsync)
        monkeypatch.setattr(os, "replace", record_replace)
        monkeypatch.setattr(Path, "rename", record_rename)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> CallRecorder:
    return CallRecorder(monkeypatch)


def account(folder: Path) -> Account:
    plan = AccountPlan(
        agent="s0", budget=Budget(epsilon=8.0, delta=1e-5), scope="sound", update=("F",),
        protect=("F",), event=VISIT, n_public=34,
    )  # fmt: skip
    return Account.open(folder / "s0.jsonl", plan, resume=False)


def test_a_charge_is_durable_before_a_row_can_be_read(
    recorder: CallRecorder, tmp_path: Path
) -> None:
    folder = tmp_path / "ledger"
    opened = account(folder)
    recorder.calls.clear()
    with opened.spend(VISIT, visit="round 1"):
        size = (folder / "s0.jsonl").stat().st_size
        assert recorder.calls == [(size, "s0.jsonl"), ("folder", "ledger")]
    opened.close()


def test_the_folders_of_a_new_account_are_durable(recorder: CallRecorder, tmp_path: Path) -> None:
    account(tmp_path / "above" / "ledger").close()
    made = [
        ("folder", tmp_path.name),
        ("folder", "above"),
    ]  # the entries of the folders above and ledger
    assert recorder.calls[:2] == made
    size = (tmp_path / "above" / "ledger" / "s0.jsonl").stat().st_size
    assert recorder.calls[2:] == [(size, "s0.jsonl"), ("folder", "ledger")]


def test_registered_rows_are_durable(recorder: CallRecorder, tmp_path: Path) -> None:
    row_registry.claim(tmp_path, {"s0": [b"a" * 40]})
    size = (tmp_path / "registry" / "s0.rows").stat().st_size
    assert recorder.calls[-3:] == [(size, "s0.new"), ("named", "s0.rows"), ("folder", "registry")]


def test_a_file_is_renamed_only_after_its_content_is_durable(
    recorder: CallRecorder, tmp_path: Path
) -> None:
    atomic_files.replace(tmp_path / "results.json", b"x" * 5000)
    temporary = f"{atomic_files.TEMPORARY}results.json"
    assert recorder.calls == [
        (5000, temporary), ("named", "results.json"), ("folder", tmp_path.name)
    ]  # fmt: skip


def test_a_snapshot_is_renamed_only_after_its_content_is_durable(
    recorder: CallRecorder, tmp_path: Path
) -> None:
    checkpoint.save_snapshot(tmp_path, snapshot(7))
    named = recorder.calls.index(("named", "round_00007"))
    inside = {path.name: path.stat().st_size for path in (tmp_path / "round_00007").iterdir()}
    before = [(size, name) for size, name in recorder.calls[:named] if size != "folder"]
    assert sorted(before, key=str) == sorted(((s, n) for n, s in inside.items()), key=str)
    assert recorder.calls[named - 1] == ("folder", f"{atomic_files.TEMPORARY}round_00007")
    assert recorder.calls[named + 1] == ("folder", tmp_path.name)
    assert recorder.calls[-2:] == [("named", "latest"), ("folder", tmp_path.name)]


def snapshot(number: int) -> Snapshot:
    return Snapshot(number, {"w": torch.ones(3)}, {}, "0" * 64)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_an_interrupted_replacement_of_a_snapshot_keeps_the_former_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    checkpoint.save_snapshot(tmp_path, snapshot(7))
    before = {path.name: path.read_bytes() for path in (tmp_path / "round_00007").iterdir()}
    rename: Callable[..., Path] = Path.rename

    def interrupted(self: Path, target: Path) -> Path:
        aside = "replaced" in target.name
        if aside and moment == "before":
            raise KeyboardInterrupt
        done = rename(self, target)
        if aside:
            raise KeyboardInterrupt
        return done

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", interrupted)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save_snapshot(tmp_path, snapshot(7))
    assert {p.name: p.read_bytes() for p in (tmp_path / "round_00007").iterdir()} == before
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(atomic_files.TEMPORARY)]


def test_control_the_recorder_notices_a_write_without_fsync(
    recorder: CallRecorder, tmp_path: Path
) -> None:
    (tmp_path / "new").write_bytes(b"x")
    shutil.move(tmp_path / "new", tmp_path / "file")
    os.replace(tmp_path / "file", tmp_path / "other")
    assert recorder.calls == [("named", "other")]


def test_metrics_csv_is_durable_before_the_checkpoint_of_its_rounds(
    recorder: CallRecorder, tmp_path: Path
) -> None:
    (tmp_path / "tiny.yaml").write_text(command_line.PLAIN)
    output = f"run.output={tmp_path / 'run'}"
    assert command_line.command(tmp_path / "tiny.yaml", output, "run.workers=1").status == 0
    size = (tmp_path / "run" / "metrics.csv").stat().st_size
    curves = recorder.calls.index((size, "metrics.csv"))  # including the line of the last round
    assert curves < recorder.calls.index(("named", "round_00003"))
