"""A run that was stopped, in whatever way, ends as one that never was: same weights, same metrics.

Interruptions inside this process are real signals, raised at a chosen moment; kills are SIGKILL
to real processes at random moments. "The same" is bit for bit, and the controls show that a
resume which forgets anything is found out.
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

CALLS_OF_A_ROUND = 2  # of the engine: support agents at once, query agents at once


@pytest.fixture
def here(tmp_path: Path) -> RunPaths:
    return place(tmp_path)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    """The run that never stopped."""
    reference = place(tmp_path_factory.mktemp("unbroken"))
    assert command(reference.config, reference.output).status == 0
    return reference


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    """A run that was interrupted in round 3. Tests take copies of it."""
    interrupted = place(tmp_path_factory.mktemp("stopped"))
    with stopping_at(call=2 * CALLS_OF_A_ROUND + 1):
        assert command(interrupted.config, interrupted.output).status == 130
    return interrupted


@pytest.fixture
def copy(stopped: RunPaths, tmp_path: Path) -> RunPaths:
    copied = place(tmp_path)
    shutil.copytree(stopped.run, copied.run)
    return copied


def stopping_at(call: int, number: signal.Signals = signal.SIGINT) -> Any:
    """Ctrl-C when the engine is about to deliver for the given time."""
    return signals_at_call(LocalEngine, "deliver", call, number)


# Ctrl-C -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "call"),
    [(signal.SIGINT, 2), (signal.SIGTERM, 5), (signal.SIGINT, 8)],  # in rounds 1, 3 and 4
)
def test_an_interruption_in_a_round_ends_with_130_and_resume_ends_as_if_it_had_not_been(
    here: RunPaths, unbroken: RunPaths, number: signal.Signals, call: int
) -> None:
    with stopping_at(call, number):
        outcome = command(here.config, here.output)

    assert outcome.status == 130
    assert f"--resume {here.run}" in outcome.out
    assert here.results()["status"] == "interrupted"
    assert here.results()["rounds"] == (call - 1) // CALLS_OF_A_ROUND

    assert command(here.config, "--resume", here.run).status == 0

    assert same_results(here, unbroken)
    assert here.results()["status"] == "finished"
    assert here.results()["test_accuracy"] == unbroken.results()["test_accuracy"]
    assert here.results()["bytes"] == unbroken.results()["bytes"]


@pytest.mark.parametrize(
    ("owner", "name", "call", "late"),
    [
        (CsvTracker, "round", 3, True),  # the line is written, and the round does not count
        (CsvTracker, "images", 3, False),
        (checkpoint, "save_snapshot", 2, False),
        (checkpoint, "save_snapshot", 2, True),
    ],
)
def test_an_interruption_between_rounds_is_no_different(
    here: RunPaths, unbroken: RunPaths, owner: Any, name: str, call: int, late: bool
) -> None:
    with signals_at_call(owner, name, call, signal.SIGINT, late=late):
        assert command(here.config, here.output).status == 130

    assert command(here.config, "--resume", here.run).status == 0

    assert same_results(here, unbroken)


def test_a_second_signal_during_the_checkpoint_does_no_harm(
    here: RunPaths, unbroken: RunPaths
) -> None:
    # The checkpoints: before round 1, after round 2, and the one that the first signal asks for.
    both = (signal.SIGINT, signal.SIGTERM)
    with stopping_at(5), signals_at_call(checkpoint, "_manifest", 3, *both):
        outcome = command(here.config, here.output)

    assert outcome.status == 130
    assert here.results()["rounds"] == 2
    assert command(here.config, "--resume", here.run).status == 0
    assert same_results(here, unbroken)


def test_an_interrupt_that_python_swallowed_stops_the_run_before_its_next_round(
    here: RunPaths, unbroken: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Dying:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)  # its exception cannot leave from here

    def swallowed(old: Any, self: Any, record: Any) -> None:
        if record.round == 2:
            Dying()
        old(self, record)

    monkeypatch.setattr(sys, "unraisablehook", lambda *_: None)
    with replaced(CsvTracker, "round", swallowed):
        assert command(here.config, here.output).status == 130
    assert here.results()["rounds"] == 2
    assert command(here.config, "--resume", here.run).status == 0
    assert same_results(here, unbroken)


def test_an_interruption_before_the_first_round_says_what_to_do(here: RunPaths) -> None:
    with signals_at_call(checkpoint, "save_snapshot", 1, signal.SIGINT):
        outcome = command(here.config, here.output)

    assert outcome.status == 130
    assert "run.overwrite=true" in outcome.err
    assert command(here.config, here.output, "run.overwrite=true", "algorithm.rounds=1").status == 0


def test_a_run_that_was_stopped_before_any_evaluation_says_so_and_no_accuracy(
    here: RunPaths,
) -> None:
    with stopping_at(call=CALLS_OF_A_ROUND + 1):
        outcome = command(here.config, here.output, "run.evaluate_every=3")

    assert outcome.status == 130
    assert "1 rounds" in outcome.out and "No round was evaluated yet." in outcome.out
    assert "Test accuracy" not in outcome.out


# A shell's background job ignores Ctrl-C: what "before" is, only this process knows.
BEFORE = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}


def test_signals_are_as_before_when_the_command_has_ended(stopped: RunPaths) -> None:
    assert {number: signal.getsignal(number) for number in BEFORE} == BEFORE


def test_a_real_process_is_stopped_by_ctrl_c_pressed_twice(
    here: RunPaths, unbroken: RunPaths, tmp_path: Path
) -> None:
    """In a round, and while the checkpoint is written that the first one asked for."""
    began, saves, pressed = (tmp_path / name for name in ("began", "saves", "pressed"))

    def stay(old: Any, self: Any, record: Any) -> None:
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

    arguments = [str(here.config), here.output, "run.checkpoint_every=100", "--quiet"]
    with replaced(CsvTracker, "round", stay), replaced(checkpoint, "_manifest", save):
        process = ForkedCommand(train.main, arguments, here.config.parent)
    wait_for(began, process)
    process.send_signal(signal.SIGINT)
    wait_for(saves, process)
    process.send_signal(signal.SIGINT)
    pressed.touch()
    out, err = process.communicate(timeout=300)

    assert process.returncode == 130, err
    assert "Interrupted; continue with --resume" in out
    assert "Traceback" not in err
    assert command(here.config, "--resume", here.run).status == 0
    assert same_results(here, unbroken)


# kill -9 ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_kills_at_random_moments_change_nothing(
    here: RunPaths, unbroken: RunPaths, kills: int
) -> None:
    draw, moments = random.Random(), list[float]()
    while len(moments) < kills:
        process = ForkedCommand(train.main, start_or_go_on(here), here.config.parent)
        moment = draw.uniform(0.05, 1.0)
        if process.wait(moment) is None:
            moments.append(moment)
            process.kill()
        else:  # it has ended: once more from the start
            assert same_results(here, unbroken), moments
            shutil.rmtree(here.run)
        process.wait()

    outcome = command(*start_or_go_on(here))

    assert outcome.status == 0, (moments, outcome)
    assert same_results(here, unbroken), moments


def start_or_go_on(here: RunPaths) -> list[str]:
    """What a user types after a crash."""
    if (here.run / "checkpoints" / "latest").exists():
        return [str(here.config), here.output, "--resume", str(here.run), "--quiet"]
    return [str(here.config), here.output, "run.overwrite=true", "--quiet"]


# Going on -----------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["its own", "the original", "none"])
def test_either_config_serves_to_go_on_and_none_is_its_own(
    copy: RunPaths, unbroken: RunPaths, which: str
) -> None:
    config = {"its own": [copy.run / "config.yaml"], "the original": [copy.config], "none": []}

    assert command(*config[which], "--resume", copy.run).status == 0

    assert same_results(copy, unbroken)


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0)], ids=["before", "after"])
def test_values_are_held_against_the_run_without_a_config_too(
    copy: RunPaths, unbroken: RunPaths, order: Sequence[int]
) -> None:
    def resumed(value: str) -> Outcome:
        given = (value, "--resume", copy.run)
        return command(*(given[place] for place in order))

    assert_refused(resumed("run.seed=7"), "run.seed is 7 here")
    assert resumed("run.checkpoint_every=1").status == 0
    assert same_results(copy, unbroken)


def test_a_command_without_any_config_asks_for_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        train.main([])
    assert stopped.value.code == 2
    assert "which config? Give a YAML file" in capsys.readouterr().err


def test_a_finished_run_is_left_as_it_is_and_says_so(unbroken: RunPaths) -> None:
    before = tree(unbroken.run)

    outcome = command(unbroken.config, "--resume", unbroken.run)

    assert outcome.status == 0
    assert "finished already; nothing was changed" in outcome.out
    assert outcome.out.splitlines()[-1].startswith("NO GUARANTEE")
    assert tree(unbroken.run) == before


def test_a_finished_run_still_prints_its_results_as_json(unbroken: RunPaths) -> None:
    outcome = command(unbroken.config, "--resume", unbroken.run, "--json")

    assert json.loads(outcome.out) == unbroken.results()


def test_settings_that_decide_over_nothing_may_change(copy: RunPaths, unbroken: RunPaths) -> None:
    outcome = command(copy.config, "--resume", copy.run, "run.checkpoint_every=1", "run.name=other")

    assert outcome.status == 0
    assert same_results(copy, unbroken)


def test_a_damaged_checkpoint_is_passed_over(copy: RunPaths, unbroken: RunPaths) -> None:
    folder = copy.run / "checkpoints"
    newest = folder / (folder / "latest").read_text().strip() / "state.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])

    outcome = command(copy.config, "--resume", copy.run)

    assert outcome.status == 0
    assert "Warning: checkpoint round_00002 is damaged" in outcome.err
    assert same_results(copy, unbroken)


def test_rounds_after_the_last_checkpoint_are_done_again_and_shown_once(
    here: RunPaths, unbroken: RunPaths, stopped: RunPaths
) -> None:
    # As after a kill at the very end of a run whose last checkpoint is of round 2.
    shutil.copytree(unbroken.run, here.run)
    for name in ("results.json", "classifier.safetensors"):
        (here.run / name).unlink()
    shutil.rmtree(here.run / "checkpoints")
    shutil.copytree(stopped.run / "checkpoints", here.run / "checkpoints")

    assert command(here.config, "--resume", here.run).status == 0

    assert same_results(here, unbroken)
    events = EventAccumulator(str(here.run / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("test/accuracy")] == [1, 2, 3, 4]


def test_a_resume_that_forgets_what_agents_remember_would_be_noticed(
    copy: RunPaths, unbroken: RunPaths
) -> None:
    # The control of all tests here: equal weights are not for want of anything to forget.
    with replaced(LocalEngine, "restore", lambda old, engine, memories: None):
        assert command(copy.config, "--resume", copy.run).status == 0

    assert not same_results(copy, unbroken)


# What is refused ----------------------------------------------------------------------------


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
def test_a_config_that_would_change_results_is_refused_with_what_differs(
    copy: RunPaths, override: str, fragments: list[str]
) -> None:
    before = tree(copy.run)

    assert_refused(command(copy.config, "--resume", copy.run, *override.split()), *fragments)

    assert tree(copy.run) == before


def test_another_precision_is_another_config_for_a_finished_run_too(unbroken: RunPaths) -> None:
    before = tree(unbroken.run)
    outcome = command(unbroken.config, "--resume", unbroken.run, "run.precision=bfloat16")
    assert_refused(outcome, "run.precision is bfloat16 here, but float32 there")
    assert tree(unbroken.run) == before


@pytest.mark.parametrize("text", ["[]", "{}", '{"status": "finished"}'])
def test_results_of_another_form_are_refused_in_words(copy: RunPaths, text: str) -> None:
    (copy.run / "results.json").write_text(text)
    outcome = command(copy.config, "--resume", copy.run)
    assert_refused(outcome, "results.json is not what a run writes", "--resume writes it anew")


def test_checkpoints_that_may_not_be_read_are_told_in_words(
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


def test_a_folder_that_is_not_there_is_named_without_a_config_too(here: RunPaths) -> None:
    assert_refused(command("--resume", here.run), str(here.run), "there is no such folder")
    assert not here.run.exists()


def test_a_folder_that_is_no_run_cannot_be_resumed(here: RunPaths) -> None:
    assert_refused(command(here.config, "--resume", here.run), str(here.run), "not the folder of")
    assert not here.run.exists()

    here.run.mkdir()
    (here.run / "thesis.txt").write_text("years of work")

    assert_refused(command(here.config, "--resume", here.run), str(here.run), "not the folder of")
    assert [path.name for path in here.run.iterdir()] == ["thesis.txt"]

    (here.config.parent / "other.yaml").write_text("data: {}")
    refused = command("--resume", here.config.parent)
    assert_refused(
        refused, f"{here.config.parent} is not the folder of a run", "has no config.yaml"
    )
    (here.run / "config.yaml").write_text("data: {}")
    refused = command("--resume", here.run / "config.yaml")
    assert_refused(refused, "config.yaml is not the folder of a run", f"Give --resume {here.run}")


def test_a_run_without_a_checkpoint_cannot_be_resumed(copy: RunPaths) -> None:
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
    """A private run of 4 planned visits, interrupted after the visits of round 3 were paid for."""
    interrupted = place(tmp_path_factory.mktemp("stopped_private"), PRIVATE)
    # In sequence: s0, s1, then the query agents at once.
    with signals_at_call(LocalEngine, "deliver", 2 * 3 + 3, signal.SIGINT):
        assert command(interrupted.config, interrupted.output).status == 130
    return interrupted


@pytest.fixture
def private_copy(stopped_private: RunPaths, tmp_path: Path) -> RunPaths:
    copied = place(tmp_path, PRIVATE)
    shutil.copytree(stopped_private.run, copied.run)
    return copied


def test_a_private_run_that_goes_on_counts_no_less(
    private_copy: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    paid = {name: path.read_bytes() for name, path in ledgers(private_copy).items()}
    assert set(paid) == {"s0", "s1"}
    for path in ledgers(private_copy).values():
        assert len(read_journal(path).events) == 3  # round 3 is lost, but its visits are paid for

    assert command(private_copy.config, "--resume", private_copy.run).status == 0

    for name, path in ledgers(private_copy).items():
        assert path.read_bytes().startswith(paid[name])  # nothing is forgotten or rewritten
        # Four visits use the budget up. One was lost, so one of the rounds went without.
        journal = read_journal(path)
        assert len(journal.events) == 4
        assert journal.epsilon <= 4.0
    assert private_copy.results()["status"] == "budget_exhausted"
    assert private_copy.results()["privacy"]["guarantee"]["epsilon"] <= 4.0
    assert audit.main([str(private_copy.run)]) == 0
    capsys.readouterr()


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_an_interruption_while_a_visit_is_paid_for_leaves_a_card_of_what_the_ledgers_say(
    tmp_path: Path, late: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    at = place(tmp_path, PRIVATE)
    # s0 and s1 begin, s0 pays and settles, s1 pays: its line is on the disk, or may be.
    with signals_at_call(journal, "sync_directory", 6, signal.SIGINT, late=late):
        assert command(at.config, at.output).status == 130
    paid = {name: len(read_journal(path).events) for name, path in ledgers(at).items()}
    assert sum(paid.values()) >= 1
    assert audit.main([str(at.run)]) == 3  # no problem; later rounds cannot be excluded
    capsys.readouterr()


def test_an_audit_between_interruption_and_resume_finds_no_lie(
    stopped_private: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    assert audit.main([str(stopped_private.run)]) == 3
    capsys.readouterr()


def _cut(path: Path) -> None:
    """The last line is gone, as after a restore of an older backup."""
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-3]))


def _edited(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"steps":2', b'"steps":1', 1))


@pytest.mark.parametrize(
    ("harm", "fragments"),
    [
        (Path.unlink, ["missing", "Put it back"]),
        (_cut, ["cut or rolled back", "Put the true journal back"]),
        (_edited, ["Put the true journal back"]),
    ],
)
def test_a_ledger_that_was_tampered_with_stops_the_run_before_anything_is_touched(
    private_copy: RunPaths, harm: Callable[[Path], None], fragments: list[str]
) -> None:
    ledger = ledgers(private_copy)["s1"]
    harm(ledger)
    before = tree(private_copy.run)

    outcome = command(private_copy.config, "--resume", private_copy.run)

    assert_refused(outcome, str(ledger), *fragments)
    after = tree(private_copy.run)
    changed = {name for name in before | after if before.get(name) != after.get(name)}
    assert changed <= {"train.log"}  # which tells of the attempt


def test_a_line_that_a_crash_left_unfinished_is_charged_and_the_run_goes_on(
    private_copy: RunPaths,
) -> None:
    ledger = ledgers(private_copy)["s0"]
    with ledger.open("ab") as file:
        file.write(b'{"event":{"kind"')
    assert len(read_journal(ledger).events) == 4  # the unfinished line counts as a whole visit

    assert command(private_copy.config, "--resume", private_copy.run).status == 0

    assert len(read_journal(ledger).events) == 4  # so that there is no visit left


# The rows -----------------------------------------------------------------------------------------


def with_own_rows(folder: Path, text: str, more: int = 0) -> RunPaths:
    """A run of rows in a file, which is written anew, with some rows more at its end."""
    rng = np.random.default_rng(0)
    x, y = rng.random((400, 1, 8, 8), dtype=np.float32), np.arange(400) % 10
    x_train, y_train = x[: 300 + more], y[: 300 + more]
    np.savez(folder / "rows.npz", x_train=x_train, y_train=y_train, x_test=x[:50], y_test=y[:50])
    return place(folder, text.replace("name: toy", f"name: npz, root: {folder / 'rows.npz'}"))


def stopped_on_own_rows(folder: Path, text: str) -> RunPaths:
    at = with_own_rows(folder, text)
    assert at.config.read_text() != text
    with signals_at_call(LocalEngine, "deliver", 7, signal.SIGINT):
        assert command(at.config, at.output).status == 130
    return at


@pytest.mark.parametrize("text", [PLAIN, PRIVATE], ids=["plain", "private"])
def test_a_run_whose_data_is_other_than_it_was_does_not_go_on(tmp_path: Path, text: str) -> None:
    at = stopped_on_own_rows(tmp_path, text)
    paid = {name: path.read_bytes() for name, path in ledgers(at).items()}
    with_own_rows(tmp_path, text, more=1)
    before = tree(at.run)
    outcome = command(at.config, "--resume", at.run)
    assert_refused(outcome, "began with other data", "Put the former data back")
    told = json.loads((at.run / "split.json").read_text())["hash"][:12]
    assert told not in (at.run / "train.log").read_text() or text == PLAIN
    assert {name: path.read_bytes() for name, path in ledgers(at).items()} == paid
    after = tree(at.run)
    assert {n for n in before | after if before.get(n) != after.get(n)} <= {"train.log"}
    with_own_rows(tmp_path, text)  # the control
    assert command(at.config, "--resume", at.run).status == 0


@pytest.mark.parametrize("text", [PLAIN, PRIVATE], ids=["plain", "private"])
def test_a_run_of_one_process_does_not_go_on_at_sites_whose_accounts_would_begin_anew(
    text: str, tmp_path: Path
) -> None:
    at = place(tmp_path, text)
    with signals_at_call(LocalEngine, "deliver", 7, signal.SIGINT):
        assert command(at.config, at.output).status == 130
    there = command(at.config, "--resume", at.run, "run.engine=flower", "run.superlink=localhost:9")
    assert_refused(there, "was begun with run.engine=local", "Continue with run.engine=local")


def test_a_link_to_nowhere_is_no_source(tmp_path: Path) -> None:
    (tmp_path / "privssl").mkdir()
    before = fingerprint_of(tmp_path)
    (tmp_path / "privssl" / ".#run.py").symlink_to("somebody@somewhere.1234")  # an editor's lock
    assert fingerprint_of(tmp_path) == before


def test_a_run_that_goes_on_with_other_code_is_told_so(
    copy: RunPaths, unbroken: RunPaths, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert unbroken.results()["versions"]["sources"] == fingerprint()
    monkeypatch.setattr(resume, "fingerprint", lambda: "0123456789ab")
    outcome = command(copy.config, "--resume", copy.run)
    assert outcome.status == 0 and same_results(copy, unbroken)
    said = " ".join(outcome.err.split())
    assert "checkpoint of round 2 was made by other code of privssl (sources" in said
    monkeypatch.undo()
    (tmp_path / "again").mkdir()
    quiet = place(tmp_path / "again")
    shutil.copytree(copy.run, quiet.run)
    (quiet.run / "results.json").unlink()
    assert "other code" not in command(quiet.config, "--resume", quiet.run).err  # the control


def test_any_change_of_a_source_is_another_code(tmp_path: Path) -> None:
    (tmp_path / "privssl").mkdir()
    seen = set()
    for name, text in (("a.py", ""), ("a.py", "x"), ("b.py", "x"), ("b.cpp", "x"), ("c.txt", "")):
        (tmp_path / "privssl" / name).write_text(text)
        seen.add(fingerprint_of(tmp_path))
    assert len(seen) == 4  # the last is no source


HARMS = [Path.unlink, lambda path: path.write_text("{")]


@pytest.mark.parametrize("harm", HARMS, ids=["lost", "damaged"])
def test_a_split_that_is_lost_or_damaged_is_written_anew_without_privacy_and_needed_with_it(
    tmp_path: Path, harm: Callable[[Path], object]
) -> None:
    at = stopped_on_own_rows(tmp_path, PLAIN)
    split = at.run / "split.json"
    was = split.read_bytes()
    harm(split)
    with_own_rows(tmp_path, PLAIN, more=1)
    assert_refused(command(at.config, "--resume", at.run), "began with other data")
    with_own_rows(tmp_path, PLAIN)
    assert command(at.config, "--resume", at.run).status == 0
    assert split.read_bytes() == was

    (tmp_path / "private").mkdir()
    at = stopped_on_own_rows(tmp_path / "private", PRIVATE)
    split = at.run / "split.json"
    was = split.read_bytes()
    harm(split)
    assert_refused(command(at.config, "--resume", at.run), "split.json", "Put it back")
    split.write_bytes(was.replace(b'"seed":0', b'"seed":1'))
    assert_refused(command(at.config, "--resume", at.run), "or was changed")
    told = json.loads(was)["hash"][:12]
    assert told not in (at.run / "train.log").read_text()
    split.write_bytes(was)
    assert command(at.config, "--resume", at.run).status == 0


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("train.log", "Device cpu, torch", "Device cuda, torch"),
        ("config.yaml", "device: auto", "device: cuda:1"),
    ],
)
def test_a_private_run_whose_steps_took_a_gpu_is_not_resumed(
    tmp_path: Path, file: str, old: str, new: str
) -> None:
    here = place(tmp_path, PRIVATE)
    with signals_at_call(LocalEngine, "deliver", 3 * CALLS_OF_A_ROUND, signal.SIGINT):
        assert command(here.config, here.output).status == 130
    text = (here.run / file).read_text()
    assert old in text
    (here.run / file).write_text(text.replace(old, new))
    resumed = command(here.config, here.output, "--resume", here.run)
    assert_refused(resumed, f"{file} says that private steps took cuda", "Start a new run")
    (here.run / file).write_text(text)
    assert command(here.config, here.output, "--resume", here.run).status == 0  # the control
