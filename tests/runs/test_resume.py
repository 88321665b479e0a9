"""Resume: an interrupted or killed run ends with the weights and metrics of an uninterrupted one.

Interruptions are signals raised at a chosen moment; kills are SIGKILL to other processes at random
moments. Results are compared bit for bit; a control shows that a resume with lost state is noticed.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
    EventAccumulator,
)

import privssl.train as train
from accounting import journal
from accounting.ledger import read_journal
from privssl.audit import __main__ as audit
from privssl.engines.local import LocalEngine
from privssl.reporting.trackers import CsvTracker
from privssl.runs import checkpoint, resume, run_dir
from privssl.runtime.code_version import fingerprint, fingerprint_of
from tests.support.command_line import Outcome, assert_refused, tree
from tests.support.forked_command import ForkedCommand, wait_for
from tests.support.resume import (
    PLAIN,
    PRIVATE,
    RunPaths,
    command,
    ledgers,
    place,
    replaced,
    same_results,
    signals_at_call,
)

CALLS_OF_A_ROUND = 2  # deliveries per round: one to support agents, one to query agents


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return place(tmp_path)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    """A run without interruption."""
    reference = place(tmp_path_factory.mktemp("unbroken"))
    assert command(reference.config, reference.output).status == 0
    return reference


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    """A run that was interrupted in round 3. Tests take copies of it."""
    interrupted = place(tmp_path_factory.mktemp("stopped"))
    with interrupted_at_delivery(call=2 * CALLS_OF_A_ROUND + 1):
        assert command(interrupted.config, interrupted.output).status == 130
    return interrupted


@pytest.fixture
def copy(stopped: RunPaths, tmp_path: Path) -> RunPaths:
    copied = place(tmp_path)
    shutil.copytree(stopped.run, copied.run)
    return copied


def interrupted_at_delivery(call: int, number: signal.Signals = signal.SIGINT) -> Any:
    """Raise a signal before delivery number ``call`` of the engine."""
    return signals_at_call(LocalEngine, "deliver", call, number)


# Ctrl-C -------------------------------------------------------------------------------------


@pytest.mark.fast_cases("15-5")
@pytest.mark.parametrize(
    ("number", "call"),
    [(signal.SIGINT, 2), (signal.SIGTERM, 5), (signal.SIGINT, 8)],  # in rounds 1, 3 and 4
)
def test_a_run_interrupted_in_a_round_exits_with_130_and_resumes_to_the_same_results(
    paths: RunPaths, uninterrupted: RunPaths, number: signal.Signals, call: int
) -> None:
    with interrupted_at_delivery(call, number):
        outcome = command(paths.config, paths.output)

    assert outcome.status == 130
    assert f"--resume {paths.run}" in outcome.out
    assert paths.results()["status"] == "interrupted"
    assert paths.results()["rounds"] == (call - 1) // CALLS_OF_A_ROUND

    assert command(paths.config, "--resume", paths.run).status == 0

    assert same_results(paths, uninterrupted)
    assert paths.results()["status"] == "finished"
    assert paths.results()["test_accuracy"] == uninterrupted.results()["test_accuracy"]
    assert paths.results()["bytes"] == uninterrupted.results()["bytes"]


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    ("owner", "name", "call", "late"),
    [
        (CsvTracker, "round", 3, True),  # the line is written, but the round does not count
        (CsvTracker, "images", 3, False),
        (checkpoint, "save_snapshot", 2, False),
        (checkpoint, "save_snapshot", 2, True),
    ],
)
def test_a_run_interrupted_between_rounds_resumes_to_the_same_results(
    paths: RunPaths, uninterrupted: RunPaths, owner: Any, name: str, call: int, late: bool
) -> None:
    with signals_at_call(owner, name, call, signal.SIGINT, late=late):
        assert command(paths.config, paths.output).status == 130

    assert command(paths.config, "--resume", paths.run).status == 0

    assert same_results(paths, uninterrupted)


def test_a_second_signal_during_the_checkpoint_does_not_damage_it(
    paths: RunPaths, uninterrupted: RunPaths
) -> None:
    # Checkpoints: before round 1, after round 2, and the one after the first signal.
    both = (signal.SIGINT, signal.SIGTERM)
    with interrupted_at_delivery(5), signals_at_call(checkpoint, "_build_manifest", 3, *both):
        outcome = command(paths.config, paths.output)

    assert outcome.status == 130
    assert paths.results()["rounds"] == 2
    assert command(paths.config, "--resume", paths.run).status == 0
    assert same_results(paths, uninterrupted)


@pytest.mark.slow
def test_an_interrupt_raised_in_a_finalizer_stops_the_run_before_its_next_round(
    paths: RunPaths, uninterrupted: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    class InterruptingFinalizer:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)  # an exception cannot leave a finalizer

    def interrupt_in_finalizer(old: Any, self: Any, record: Any) -> None:
        if record.round == 2:
            InterruptingFinalizer()
        old(self, record)

    monkeypatch.setattr(sys, "unraisablehook", lambda *_: None)
    with replaced(CsvTracker, "round", interrupt_in_finalizer):
        assert command(paths.config, paths.output).status == 130
    assert paths.results()["rounds"] == 2
    assert command(paths.config, "--resume", paths.run).status == 0
    assert same_results(paths, uninterrupted)


def test_an_interruption_before_the_first_round_advises_to_overwrite_the_run(
    paths: RunPaths,
) -> None:
    with signals_at_call(checkpoint, "save_snapshot", 1, signal.SIGINT):
        outcome = command(paths.config, paths.output)

    assert outcome.status == 130
    assert "run.overwrite=true" in outcome.err
    assert (
        command(paths.config, paths.output, "run.overwrite=true", "algorithm.rounds=1").status == 0
    )


def test_a_run_interrupted_before_any_evaluation_prints_no_accuracy(
    paths: RunPaths,
) -> None:
    with interrupted_at_delivery(call=CALLS_OF_A_ROUND + 1):
        outcome = command(paths.config, paths.output, "run.evaluate_every=3")

    assert outcome.status == 130
    assert "1 rounds" in outcome.out and "No round was evaluated yet." in outcome.out
    assert "Test accuracy" not in outcome.out


# The original handlers depend on the shell: background jobs ignore SIGINT.
ORIGINAL_HANDLERS = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}


def test_the_command_restores_the_signal_handlers(stopped: RunPaths) -> None:
    assert {number: signal.getsignal(number) for number in ORIGINAL_HANDLERS} == ORIGINAL_HANDLERS


@pytest.mark.slow
def test_a_process_interrupted_twice_by_ctrl_c_writes_its_checkpoint(
    paths: RunPaths, uninterrupted: RunPaths, tmp_path: Path
) -> None:
    """The first signal comes in a round, the second while its checkpoint is written."""
    began, saves, pressed = (tmp_path / name for name in ("began", "saves", "pressed"))

    def block_in_round_2(old: Any, self: Any, record: Any) -> None:
        old(self, record)
        if record.round == 2:
            began.touch()
            time.sleep(600)

    def save(old: Any, *given: Any, **named: Any) -> Any:
        if began.exists():
            saves.touch()
            end = time.monotonic() + 300
            while not pressed.exists() and time.monotonic() < end:
                time.sleep(0.01)
        return old(*given, **named)

    arguments = [str(paths.config), paths.output, "run.checkpoint_every=100", "--quiet"]
    with (
        replaced(CsvTracker, "round", block_in_round_2),
        replaced(checkpoint, "_build_manifest", save),
    ):
        process = ForkedCommand(train.main, arguments, paths.config.parent)
    wait_for(began, process)
    process.send_signal(signal.SIGINT)
    wait_for(saves, process)
    process.send_signal(signal.SIGINT)
    pressed.touch()
    out, err = process.communicate(timeout=300)

    assert process.returncode == 130, err
    assert "Interrupted; continue with: python -m privssl.train --resume " in out
    assert "Traceback" not in err
    assert command(paths.config, "--resume", paths.run).status == 0
    assert same_results(paths, uninterrupted)


# kill -9 ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_kills_at_random_moments_do_not_change_the_results(
    paths: RunPaths, uninterrupted: RunPaths, kills: int
) -> None:
    draw, moments = random.Random(), list[float]()
    while len(moments) < kills:
        process = ForkedCommand(train.main, start_or_resume(paths), paths.config.parent)
        moment = draw.uniform(0.05, 1.0)
        if process.wait(moment) is None:
            moments.append(moment)
            process.kill()
        else:  # it finished: start again
            assert same_results(paths, uninterrupted), moments
            shutil.rmtree(paths.run)
        process.wait()

    outcome = command(*start_or_resume(paths))

    assert outcome.status == 0, (moments, outcome)
    assert same_results(paths, uninterrupted), moments


def start_or_resume(paths: RunPaths) -> list[str]:
    """The arguments that a user gives after a crash."""
    if (paths.run / "checkpoints" / "latest").exists():
        return [str(paths.config), paths.output, "--resume", str(paths.run), "--quiet"]
    return [str(paths.config), paths.output, "run.overwrite=true", "--quiet"]


# Resuming -----------------------------------------------------------------------------------


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("which", ["its own", "the original", "none"])
def test_resume_accepts_the_runs_config_the_original_config_or_none(
    copy: RunPaths, uninterrupted: RunPaths, which: str
) -> None:
    config = {"its own": [copy.run / "config.yaml"], "the original": [copy.config], "none": []}

    assert command(*config[which], "--resume", copy.run).status == 0

    assert same_results(copy, uninterrupted)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0)], ids=["before", "after"])
def test_resume_without_a_config_checks_overrides_against_the_run(
    copy: RunPaths, uninterrupted: RunPaths, order: Sequence[int]
) -> None:
    def resumed(value: str) -> Outcome:
        given = (value, "--resume", copy.run)
        return command(*(given[place] for place in order))

    assert_refused(resumed("run.seed=7"), "run.seed is 7 here")
    assert resumed("run.checkpoint_every=1").status == 0
    assert same_results(copy, uninterrupted)


def test_the_command_without_a_config_asks_for_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        train.main([])
    assert stopped.value.code == 2
    assert "which config? Give a YAML file" in capsys.readouterr().err


def test_resume_of_a_finished_run_changes_nothing_and_says_so(uninterrupted: RunPaths) -> None:
    before = tree(uninterrupted.run)

    outcome = command(uninterrupted.config, "--resume", uninterrupted.run)

    assert outcome.status == 0
    assert "finished already; nothing was changed" in outcome.out
    assert outcome.out.splitlines()[-1].startswith("NO GUARANTEE")
    assert tree(uninterrupted.run) == before


def test_resume_of_a_finished_run_prints_its_results_as_json(uninterrupted: RunPaths) -> None:
    outcome = command(uninterrupted.config, "--resume", uninterrupted.run, "--json")

    assert json.loads(outcome.out) == uninterrupted.results()


def test_settings_without_effect_on_results_may_change_on_resume(
    copy: RunPaths, uninterrupted: RunPaths
) -> None:
    outcome = command(copy.config, "--resume", copy.run, "run.checkpoint_every=1", "run.name=other")

    assert outcome.status == 0
    assert same_results(copy, uninterrupted)


def test_resume_skips_a_damaged_checkpoint(copy: RunPaths, uninterrupted: RunPaths) -> None:
    folder = copy.run / "checkpoints"
    newest = folder / (folder / "latest").read_text().strip() / "state.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])

    outcome = command(copy.config, "--resume", copy.run)

    assert outcome.status == 0
    assert "Warning: checkpoint round_00002 is damaged" in outcome.err
    assert same_results(copy, uninterrupted)


def test_rounds_after_the_last_checkpoint_run_again_and_are_logged_once(
    paths: RunPaths, uninterrupted: RunPaths, stopped: RunPaths
) -> None:
    # As after a kill at the end of a run whose last checkpoint is of round 2.
    shutil.copytree(uninterrupted.run, paths.run)
    for name in ("results.json", "classifier.safetensors"):
        (paths.run / name).unlink()
    shutil.rmtree(paths.run / "checkpoints")
    shutil.copytree(stopped.run / "checkpoints", paths.run / "checkpoints")

    assert command(paths.config, "--resume", paths.run).status == 0

    assert same_results(paths, uninterrupted)
    events = EventAccumulator(str(paths.run / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("test/accuracy")] == [1, 2, 3, 4]


def test_control_a_resume_without_agent_memories_has_other_results(
    copy: RunPaths, uninterrupted: RunPaths
) -> None:
    # The control of all tests here: memories do affect the weights.
    with replaced(LocalEngine, "restore", lambda old, engine, memories: None):
        assert command(copy.config, "--resume", copy.run).status == 0

    assert not same_results(copy, uninterrupted)


# Refused resumes ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "fragments"),
    [
        ("algorithm.rounds=5", ["algorithm.rounds is 5 here, but 4 there"]),
        ("run.seed=1", ["run.seed is 1 here, but 0 there"]),
        (
            "data.name=npz data.root=elsewhere",
            [f"data.root is {Path('elsewhere').absolute()} here, but empty", "Data that was moved"],
        ),
        ("privacy.epsilon=1.0", ["privacy.epsilon is 1.0 here, but absent there"]),
    ],
)
def test_resume_refuses_a_config_that_would_change_results_and_names_the_key(
    copy: RunPaths, override: str, fragments: list[str]
) -> None:
    before = tree(copy.run)

    assert_refused(command(copy.config, "--resume", copy.run, *override.split()), *fragments)

    assert tree(copy.run) == before


def test_resume_of_a_finished_run_refuses_another_precision(uninterrupted: RunPaths) -> None:
    before = tree(uninterrupted.run)
    outcome = command(uninterrupted.config, "--resume", uninterrupted.run, "run.precision=bfloat16")
    assert_refused(outcome, "run.precision is bfloat16 here, but float32 there")
    assert tree(uninterrupted.run) == before


@pytest.mark.parametrize("text", ["[]", "{}", '{"status": "finished"}'])
def test_resume_refuses_a_malformed_results_file(copy: RunPaths, text: str) -> None:
    (copy.run / "results.json").write_text(text)
    outcome = command(copy.config, "--resume", copy.run)
    assert_refused(outcome, "results.json is not what a run writes", "--resume writes it anew")


def test_resume_reports_checkpoints_without_read_permission(
    copy: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.listdir

    def refuse(path: Any) -> list[str]:
        if str(path).endswith("checkpoints"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "listdir", refuse)
    outcome = command(copy.config, "--resume", copy.run)
    assert_refused(outcome, "checkpoints cannot be read: Permission denied")


def test_resume_of_a_missing_folder_names_it(paths: RunPaths) -> None:
    assert_refused(command("--resume", paths.run), str(paths.run), "there is no such folder")
    assert not paths.run.exists()


def test_resume_refuses_a_folder_that_is_no_run(paths: RunPaths) -> None:
    assert_refused(
        command(paths.config, "--resume", paths.run), str(paths.run), "not the folder of"
    )
    assert not paths.run.exists()

    paths.run.mkdir()
    (paths.run / "thesis.txt").write_text("years of work")

    assert_refused(
        command(paths.config, "--resume", paths.run), str(paths.run), "not the folder of"
    )
    assert [path.name for path in paths.run.iterdir()] == ["thesis.txt"]

    (paths.config.parent / "other.yaml").write_text("data: {}")
    refused = command("--resume", paths.config.parent)
    assert_refused(
        refused, f"{paths.config.parent} is not the folder of a run", "has no config.yaml"
    )
    (paths.run / "config.yaml").write_text("data: {}")
    refused = command("--resume", paths.run / "config.yaml")
    assert_refused(refused, "config.yaml is not the folder of a run", f"Give --resume {paths.run}")


def test_resume_refuses_a_run_without_a_checkpoint(copy: RunPaths) -> None:
    shutil.rmtree(copy.run / "checkpoints")

    assert_refused(command(copy.config, "--resume", copy.run), "no checkpoint to resume from")


def test_two_processes_cannot_train_in_one_folder(copy: RunPaths) -> None:
    before = tree(copy.run)

    with run_dir.lock_run_dir(copy.run):
        going_on = command(copy.config, "--resume", copy.run)
        replacing = command(copy.config, copy.output, "run.overwrite=true")

    assert_refused(going_on, str(copy.run), "another process")
    assert_refused(replacing, str(copy.run), "another process")
    assert tree(copy.run) == before


# Private runs -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stopped_private(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    """A private run of 4 planned visits, interrupted after the visits of round 3 were charged."""
    interrupted = place(tmp_path_factory.mktemp("stopped_private"), PRIVATE)
    # Deliveries: s0, s1, then the query agents together.
    with signals_at_call(LocalEngine, "deliver", 2 * 3 + 3, signal.SIGINT):
        assert command(interrupted.config, interrupted.output).status == 130
    return interrupted


@pytest.fixture
def private_copy(stopped_private: RunPaths, tmp_path: Path) -> RunPaths:
    copied = place(tmp_path, PRIVATE)
    shutil.copytree(stopped_private.run, copied.run)
    return copied


@pytest.mark.slow
def test_a_resumed_private_run_keeps_all_charges(
    private_copy: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    charged = {name: path.read_bytes() for name, path in ledgers(private_copy).items()}
    assert set(charged) == {"s0", "s1"}
    for path in ledgers(private_copy).values():
        assert len(read_journal(path).events) == 3  # round 3 is lost, but its visits are charged

    assert command(private_copy.config, "--resume", private_copy.run).status == 0

    for name, path in ledgers(private_copy).items():
        assert path.read_bytes().startswith(charged[name])  # earlier charges are unchanged
        # Four visits spend the budget. One was lost, so one round had no visit.
        journal = read_journal(path)
        assert len(journal.events) == 4
        assert journal.epsilon <= 4.0
    assert private_copy.results()["status"] == "budget_exhausted"
    assert private_copy.results()["privacy"]["guarantee"]["epsilon"] <= 4.0
    assert audit.main([str(private_copy.run)]) == 0
    capsys.readouterr()


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_a_run_interrupted_during_a_charge_has_a_card_that_agrees_with_the_ledgers(
    tmp_path: Path, late: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = place(tmp_path, PRIVATE)
    # s0 and s1 begin, s0 charges and settles, s1 charges: its line may be on the disk.
    with signals_at_call(journal, "sync_directory", 6, signal.SIGINT, late=late):
        assert command(paths.config, paths.output).status == 130
    charged = {name: len(read_journal(path).events) for name, path in ledgers(paths).items()}
    assert sum(charged.values()) >= 1
    assert audit.main([str(paths.run)]) == 3  # no problem, but later rounds cannot be excluded
    capsys.readouterr()


def test_the_audit_of_an_interrupted_private_run_is_inconclusive(
    stopped_private: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    assert audit.main([str(stopped_private.run)]) == 3
    capsys.readouterr()


def _cut(path: Path) -> None:
    """Remove the last lines, as a restored older backup does."""
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-3]))


def _edit(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"steps":2', b'"steps":1', 1))


@pytest.mark.parametrize(
    ("damage", "fragments"),
    [
        (Path.unlink, ["missing", "Put it back"]),
        (_cut, ["cut or rolled back", "Put the true journal back"]),
        (_edit, ["Put the true journal back"]),
    ],
)
def test_resume_refuses_a_tampered_ledger_and_changes_nothing(
    private_copy: RunPaths, damage: Callable[[Path], None], fragments: list[str]
) -> None:
    ledger = ledgers(private_copy)["s1"]
    damage(ledger)
    before = tree(private_copy.run)

    outcome = command(private_copy.config, "--resume", private_copy.run)

    assert_refused(outcome, str(ledger), *fragments)
    after = tree(private_copy.run)
    changed = {name for name in before | after if before.get(name) != after.get(name)}
    assert changed <= {"train.log"}  # which logs the attempt


def test_an_unfinished_ledger_line_counts_as_a_charge_and_the_run_resumes(
    private_copy: RunPaths,
) -> None:
    ledger = ledgers(private_copy)["s0"]
    with ledger.open("ab") as file:
        file.write(b'{"event":{"kind"')
    assert len(read_journal(ledger).events) == 4  # the unfinished line counts as a visit

    assert command(private_copy.config, "--resume", private_copy.run).status == 0

    assert len(read_journal(ledger).events) == 4  # the budget allows no further visit


# Changed rows, code and devices -------------------------------------------------------------------


def with_own_rows(folder: Path, text: str, more: int = 0) -> RunPaths:
    """Write a file of rows, with ``more`` rows at its end, and the config of a run on it."""
    rng = np.random.default_rng(0)
    x, y = rng.random((400, 1, 8, 8), dtype=np.float32), np.arange(400) % 10
    x_train, y_train = x[: 300 + more], y[: 300 + more]
    np.savez(folder / "rows.npz", x_train=x_train, y_train=y_train, x_test=x[:50], y_test=y[:50])
    return place(folder, text.replace("name: toy", f"name: npz, root: {folder / 'rows.npz'}"))


def interrupted_on_own_rows(folder: Path, text: str) -> RunPaths:
    paths = with_own_rows(folder, text)
    assert paths.config.read_text() != text
    with signals_at_call(LocalEngine, "deliver", 7, signal.SIGINT):
        assert command(paths.config, paths.output).status == 130
    return paths


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("text", [PLAIN, PRIVATE], ids=["plain", "private"])
def test_resume_refuses_changed_data(tmp_path: Path, text: str) -> None:
    paths = interrupted_on_own_rows(tmp_path, text)
    charged = {name: path.read_bytes() for name, path in ledgers(paths).items()}
    with_own_rows(tmp_path, text, more=1)
    before = tree(paths.run)
    outcome = command(paths.config, "--resume", paths.run)
    assert_refused(outcome, "began with other data", "Put the former data back")
    split_hash = json.loads((paths.run / "split.json").read_text())["hash"][:12]
    assert split_hash not in (paths.run / "train.log").read_text() or text == PLAIN
    assert {name: path.read_bytes() for name, path in ledgers(paths).items()} == charged
    after = tree(paths.run)
    assert {n for n in before | after if before.get(n) != after.get(n)} <= {"train.log"}
    with_own_rows(tmp_path, text)  # the control
    assert command(paths.config, "--resume", paths.run).status == 0


@pytest.mark.parametrize("text", [PLAIN, PRIVATE], ids=["plain", "private"])
def test_resume_refuses_to_continue_a_local_run_over_sites(text: str, tmp_path: Path) -> None:
    paths = place(tmp_path, text)
    with signals_at_call(LocalEngine, "deliver", 7, signal.SIGINT):
        assert command(paths.config, paths.output).status == 130
    there = command(
        paths.config, "--resume", paths.run, "run.engine=flower", "run.superlink=localhost:9"
    )
    assert_refused(there, "was begun with run.engine=local", "Continue with run.engine=local")


def test_the_code_fingerprint_ignores_broken_links(tmp_path: Path) -> None:
    (tmp_path / "privssl").mkdir()
    before = fingerprint_of(tmp_path)
    (tmp_path / "privssl" / ".#run.py").symlink_to(
        "somebody@somewhere.1234"
    )  # the lock file of an editor
    assert fingerprint_of(tmp_path) == before


def test_resume_warns_if_the_code_has_changed(
    copy: RunPaths, uninterrupted: RunPaths, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert uninterrupted.results()["versions"]["sources"] == fingerprint()
    monkeypatch.setattr(resume, "fingerprint", lambda: "0123456789ab")
    outcome = command(copy.config, "--resume", copy.run)
    assert outcome.status == 0 and same_results(copy, uninterrupted)
    printed = " ".join(outcome.err.split())
    assert "checkpoint of round 2 was made by other code of privssl (sources" in printed
    monkeypatch.undo()
    (tmp_path / "again").mkdir()
    quiet = place(tmp_path / "again")
    shutil.copytree(copy.run, quiet.run)
    (quiet.run / "results.json").unlink()
    assert "other code" not in command(quiet.config, "--resume", quiet.run).err  # the control


def test_the_code_fingerprint_changes_with_every_change_of_a_source_file(tmp_path: Path) -> None:
    (tmp_path / "privssl").mkdir()
    seen = set()
    for name, text in (("a.py", ""), ("a.py", "x"), ("b.py", "x"), ("b.cpp", "x"), ("c.txt", "")):
        (tmp_path / "privssl" / name).write_text(text)
        seen.add(fingerprint_of(tmp_path))
    assert len(seen) == 4  # the last file is no source


DAMAGES = [Path.unlink, lambda path: path.write_text("{")]


@pytest.mark.fast_cases("lost")
@pytest.mark.parametrize("damage", DAMAGES, ids=["lost", "damaged"])
def test_resume_rewrites_a_lost_split_of_a_plain_run_and_refuses_that_of_a_private_run(
    tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    paths = interrupted_on_own_rows(tmp_path, PLAIN)
    split = paths.run / "split.json"
    was = split.read_bytes()
    damage(split)
    with_own_rows(tmp_path, PLAIN, more=1)
    assert_refused(command(paths.config, "--resume", paths.run), "began with other data")
    with_own_rows(tmp_path, PLAIN)
    assert command(paths.config, "--resume", paths.run).status == 0
    assert split.read_bytes() == was

    (tmp_path / "private").mkdir()
    paths = interrupted_on_own_rows(tmp_path / "private", PRIVATE)
    split = paths.run / "split.json"
    was = split.read_bytes()
    damage(split)
    assert_refused(command(paths.config, "--resume", paths.run), "split.json", "Put it back")
    split.write_bytes(was.replace(b'"seed":0', b'"seed":1'))
    assert_refused(command(paths.config, "--resume", paths.run), "or was changed")
    split_hash = json.loads(was)["hash"][:12]
    assert split_hash not in (paths.run / "train.log").read_text()
    split.write_bytes(was)
    assert command(paths.config, "--resume", paths.run).status == 0


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("train.log", "Device cpu, torch", "Device cuda, torch"),
        ("config.yaml", "device: auto", "device: cuda:1"),
    ],
)
def test_resume_refuses_a_private_run_that_trained_on_a_gpu(
    tmp_path: Path, file: str, old: str, new: str
) -> None:
    paths = place(tmp_path, PRIVATE)
    with signals_at_call(LocalEngine, "deliver", 3 * CALLS_OF_A_ROUND, signal.SIGINT):
        assert command(paths.config, paths.output).status == 130
    text = (paths.run / file).read_text()
    assert old in text
    (paths.run / file).write_text(text.replace(old, new))
    resumed = command(paths.config, paths.output, "--resume", paths.run)
    assert_refused(resumed, f"{file} says that private steps took cuda", "Start a new run")
    (paths.run / file).write_text(text)
    assert command(paths.config, paths.output, "--resume", paths.run).status == 0  # the control
