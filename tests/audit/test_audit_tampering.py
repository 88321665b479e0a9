"""Whoever edits the folder of a finished run is told of, or makes the claim larger.

One private toy run is made, and every tampering is done to a copy of it. Deleting files, editing
numbers, and writing ledgers and card anew so that their hashes fit: no folder that was touched is
CONSISTENT without a note, and no smaller claim is CONSISTENT at all. Negative control: the folder
that nobody touched is, and without the check of witnesses a deleted one goes unseen.
"""

import hashlib
import itertools
import json
import math
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from accounting import verify
from accounting.account_plan import AccountPlan
from accounting.budget import Budget
from accounting.events import PoissonSampledGaussianEvent
from accounting.ledger import Account, read_journal
from privssl.audit import __main__ as audit
from privssl.audit import witnesses
from privssl.audit.__main__ import Report, Verdict
from privssl.data.split_manifest import read_manifest
from privssl.errors import DataError, RunFolderError
from privssl.experiment import config
from privssl.privacy.card_text import render_markdown
from privssl.privacy.privacy_card import privacy_card
from privssl.runs import accounts as runs_accounts
from privssl.runs import checkpoint
from privssl.runs.accounts import FORMER, read_metrics, record_former_ledgers
from tests.support.command_line import command

CONFIG = """\
data: {name: toy, labelled: 40, labels: labels-at-client}
agents: {mixed: 2}
model: {name: small_cnn, width: 4}
algorithm: {name: fedssl, rounds: 4, local_steps: 1, batch_size: 8, generator_width: 4, warm_up: 1}
privacy: {epsilon: 8.0, delta: 1.0e-5, sample_rate: 0.25, steps: 5}
"""
LAST = "checkpoints/round_00004/snapshot.json"
#: Without one of these, what is claimed cannot be put to the test.
BEARING = ("config.yaml", "results.json", "metrics.csv", "checkpoints", "classifier.safetensors")
#: These say nothing of the claim that the others do not say.
OTHERS = ("privacy.md", "split.json", "train.log", "tensorboard")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    (folder / "toy.yaml").write_text(CONFIG)
    outcome = command(folder / "toy.yaml", f"run.output={folder / 'run'}")
    assert outcome.status == 0, outcome
    return folder / "run"


@pytest.fixture
def one_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without dp-accounting, which takes a second for each new list of releases: what was touched
    must show all the same."""
    monkeypatch.setattr(verify, "available", lambda: False)


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


def remove(run: Path, names: Iterable[str]) -> None:
    for name in names:
        path = run / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def told(report: Report) -> str:
    parts = [*report.problems, *report.doubts, *report.notes]
    return "\n".join([*parts, *(text for a in report.agents for text in a.problems)])


def edit(name: str, *keys: Any, value: Any) -> Callable[[Path], None]:
    """Puts a value, or what a function makes of the one that is there, into a file of JSON."""

    def tamper(run: Path) -> None:
        path = run / name
        whole = inner = json.loads(path.read_text())
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = value(inner[keys[-1]]) if callable(value) else value
        path.write_text(json.dumps(whole, indent=2) + "\n")

    return tamper


def replaced(name: str, old: str, new: str) -> Callable[[Path], None]:
    def tamper(run: Path) -> None:
        text = (run / name).read_text()
        assert old in text
        (run / name).write_text(text.replace(old, new))

    return tamper


def flipped(name: str, at: int = -1) -> Callable[[Path], None]:
    def tamper(run: Path) -> None:
        [path] = run.glob(name)
        content = bytearray(path.read_bytes())
        content[at] ^= 1
        path.write_bytes(content)

    return tamper


# Writing anew, with hashes that fit --------------------------------------------------------------


def card_anew(run: Path, **changes: Any) -> None:
    """privacy.json, privacy.md and results.json for whatever ledgers are there."""
    path = run / "privacy.json"
    card = json.loads(path.read_text())
    journals = {p.stem: read_journal(p) for p in sorted((run / "ledger").glob("*.jsonl"))}
    first = next(iter(journals.values())).plan
    usual: dict[str, Any] = {
        "scope": first.scope,
        "delta": first.budget.delta,
        "releases": [(r["name"], r["status"], r["why"]) for r in card["releases"]],
        "algorithm": card["algorithm"],
        "dataset": card["dataset"],
        "task": card["task"],
        "planned": card["planned_visits"],
        "weights": card["weights"],
        "clip_norm": card["clip_norm"],
    }
    accounts = [(name, j.plan, tuple(j.events), j.head) for name, j in journals.items()]
    card = privacy_card(accounts, **{**usual, **changes})
    path.write_text(json.dumps(card, indent=2) + "\n")
    (run / "privacy.md").write_text(render_markdown(card))
    if (run / "results.json").exists():
        claim = {name: card[name] for name in ("guarantee", "nominal_epsilon", "scope")}
        edit("results.json", "privacy", value=claim)(run)


def ledgers_anew(
    change: Callable[[AccountPlan], AccountPlan] = lambda plan: plan, visits: int = 4, **card: Any
) -> Callable[[Path], None]:
    """Ledgers of other plans or fewer visits, written by a real account, and the card for them."""

    def tamper(run: Path) -> None:
        for path in sorted((run / "ledger").glob("*.jsonl")):
            journal = read_journal(path)
            path.unlink()
            plan = change(journal.plan)
            account = Account.open(path, plan, resume=False, run=journal.runs[-1])
            for visit in list(journal.visits)[:visits]:
                with account.spend(plan.event, visit=visit):
                    pass
            account.close()
        card_anew(run, **card)

    return tamper


def with_event(**changes: Any) -> Callable[[AccountPlan], AccountPlan]:
    def change(plan: AccountPlan) -> AccountPlan:
        assert isinstance(plan.event, PoissonSampledGaussianEvent)
        return replace(plan, event=replace(plan.event, **changes))

    return change


def checkpoints_anew(run: Path) -> None:
    """What checkpoints remember of the ledgers, with checksums that fit."""
    for path in run.glob("checkpoints/*/snapshot.json"):
        about = json.loads(path.read_text())
        about["config_digest"] = config.config_hash(config.load_config(run / "config.yaml"))
        extra = about["extra"]["mapping"]
        for ledger in (run / "ledger").glob("*.jsonl"):
            journal = read_journal(ledger)
            extra[runs_accounts.LEDGER_SEQ + ledger.stem] = journal.seq
            extra[runs_accounts.LEDGER_HEAD + ledger.stem] = journal.head
        path.write_bytes(checkpoint.with_checksum(about))


def all_of(*tampers: Callable[[Path], None]) -> Callable[[Path], None]:
    def tamper(run: Path) -> None:
        for each in tampers:
            each(run)

    return tamper


def without(*names: str) -> Callable[[Path], None]:
    return lambda run: remove(run, names)


# The folder as it was ----------------------------------------------------------------------------


def test_a_folder_that_nobody_touched_is_consistent_and_nothing_is_noted(run: Path) -> None:
    report = audit.audit(run)
    assert report.verdict == Verdict.CONSISTENT
    assert told(report) == ""
    assert report.agents[0].claimed == pytest.approx(8.0, abs=1e-3)


@pytest.mark.usefixtures("one_library")
def test_with_one_library_the_folder_is_consistent_too_and_that_is_noted(run: Path) -> None:
    # The control of all tests below that do without the second one.
    report = audit.audit(run)
    assert report.verdict == Verdict.CONSISTENT
    assert told(report) == "dp-accounting is not installed: no second library"


@pytest.mark.parametrize("name", ["weights", "clip_norm", "encoder", "network"])
def test_a_card_without_what_every_version_of_its_form_writes_is_none(run: Path, name: str) -> None:
    card = json.loads((run / "privacy.json").read_text())
    del card[name]
    (run / "privacy.json").write_text(json.dumps(card))
    with pytest.raises(RunFolderError, match=f"not a privacy card \\({name}: Field required"):
        audit.audit(run)


def test_the_card_names_the_weights_that_the_run_released(run: Path) -> None:
    content = (run / "classifier.safetensors").read_bytes()
    assert json.loads((run / "privacy.json").read_text())["weights"] == {
        "file": "classifier.safetensors",
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    assert hashlib.sha256(content).hexdigest() in (run / "privacy.md").read_text()


# Deleting ----------------------------------------------------------------------------------------


def test_no_set_of_deleted_witnesses_leaves_a_folder_consistent(
    finished: Path, tmp_path: Path
) -> None:
    subsets = [s for n in range(1, 6) for s in itertools.combinations(BEARING, n)]
    assert len(subsets) == 31
    for number, names in enumerate(subsets):
        run = shutil.copytree(finished, tmp_path / str(number))
        remove(run, names)
        report = audit.audit(run)
        assert report.verdict == Verdict.INCONCLUSIVE, names
        assert all(name in told(report) for name in names), (names, told(report))


def test_files_that_do_not_bear_on_the_claim_are_noted_when_they_are_absent(
    finished: Path, tmp_path: Path
) -> None:
    for number, names in enumerate(
        s for n in (1, 2, 3, 4) for s in itertools.combinations(OTHERS, n)
    ):
        run = shutil.copytree(finished, tmp_path / str(number))
        remove(run, names)
        report = audit.audit(run)
        assert report.verdict == Verdict.CONSISTENT
        assert all(f"{name} is absent" in report.notes[i] for i, name in enumerate(names))


@pytest.mark.usefixtures("one_library")
def test_a_cut_ledger_is_never_consistent_whatever_else_was_deleted(
    finished: Path, tmp_path: Path
) -> None:
    cut = shutil.copytree(finished, tmp_path / "cut")
    ledgers_anew(visits=2)(cut)
    for number, names in enumerate(s for n in range(6) for s in itertools.combinations(BEARING, n)):
        run = shutil.copytree(cut, tmp_path / str(number))
        remove(run, names)
        report = audit.audit(run)
        assert report.agents[0].claimed == pytest.approx(5.993, abs=1e-3)
        assert report.verdict in (Verdict.VIOLATED, Verdict.INCONCLUSIVE), names


def test_without_the_check_of_witnesses_a_deleted_one_goes_unseen(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: cut to 2 visits of 4, and nothing left that remembers more."""
    all_of(
        ledgers_anew(visits=2, planned=None),
        without("checkpoints", "metrics.csv", "results.json", "model_card.md"),
    )(run)
    assert audit.audit(run).verdict == Verdict.INCONCLUSIVE
    monkeypatch.setattr(witnesses, "check", lambda *_: None)
    assert audit.audit(run).verdict == Verdict.CONSISTENT


# Editing -----------------------------------------------------------------------------------------

SMALLER = {
    "noise of the review: 4 in ledgers and card": ledgers_anew(with_event(noise_multiplier=4.0)),
    "the same, and nobody left to remember": all_of(
        ledgers_anew(with_event(noise_multiplier=4.0)),
        without("checkpoints", "metrics.csv", "results.json"),
    ),
    "two ticks more noise": all_of(
        ledgers_anew(lambda plan: with_event(noise_multiplier=_noise(plan) + 2e-4)(plan)),
        without("checkpoints", "metrics.csv"),
    ),
    "a smaller sample rate": all_of(
        ledgers_anew(with_event(sample_rate=0.1)), without("checkpoints")
    ),
    "fewer steps": all_of(ledgers_anew(with_event(steps=1)), without("checkpoints", "metrics.csv")),
    "fewer visits": all_of(ledgers_anew(visits=2), without("checkpoints", "metrics.csv")),
    "fewer visits, also planned": all_of(
        ledgers_anew(visits=2, planned=2), without("checkpoints", "metrics.csv")
    ),
    "a smaller budget": all_of(
        ledgers_anew(lambda plan: replace(plan, budget=Budget(6.0, 1e-5)), visits=2),
        without("checkpoints", "metrics.csv"),
    ),
    "a larger delta": all_of(
        ledgers_anew(lambda plan: replace(plan, budget=Budget(8.0, 1e-3))),
        without("checkpoints", "metrics.csv"),
    ),
    "no visit at all": all_of(ledgers_anew(visits=0), checkpoints_anew, without("metrics.csv")),
    "checkpoints sealed anew": all_of(ledgers_anew(visits=2), checkpoints_anew),
    "checkpoints sealed anew, curves gone": all_of(
        ledgers_anew(visits=2), checkpoints_anew, without("metrics.csv")
    ),
    "said to be interrupted": all_of(
        ledgers_anew(visits=2, planned=None, weights=None),
        edit("results.json", "status", value="interrupted"),
        without("checkpoints", "metrics.csv", "classifier.safetensors"),
    ),
    "said to have no budget left": all_of(
        ledgers_anew(visits=2), checkpoints_anew, without("metrics.csv"),
        edit("results.json", "status", value="budget_exhausted"),
    ),
    "only the first checkpoint is left": all_of(
        ledgers_anew(visits=2), without("checkpoints/round_00004", "metrics.csv"),
    ),
    "rolled back to the first checkpoint": all_of(lambda run: _roll_back(run)),
    "the same, and no log": all_of(lambda run: _roll_back(run), without("train.log")),
    "the same, and the log edited": all_of(
        lambda run: _roll_back(run), lambda run: _empty(run / "train.log")
    ),
    "noise in the config as well": all_of(
        replaced("config.yaml", "noise_multiplier: null", "noise_multiplier: 4.0"),
        ledgers_anew(with_event(noise_multiplier=4.0)),
        without("metrics.csv"),
    ),
    "noise in the config as well, checkpoints gone": all_of(
        replaced("config.yaml", "noise_multiplier: null", "noise_multiplier: 4.0"),
        ledgers_anew(with_event(noise_multiplier=4.0)),
        without("checkpoints"),
    ),
    "one agent forgotten": all_of(
        without("ledger/m1.jsonl"), card_anew, without("checkpoints", "metrics.csv")
    ),
    "agents renamed": lambda run: _rename(run),
    "the card alone": edit("privacy.json", "epsilon", "overall", value=1.0),
    "the guarantee alone": edit("privacy.json", "guarantee", "epsilon", value=1.0),
    "the results alone": edit("results.json", "privacy", "guarantee", "epsilon", value=1.0),
    "the page alone": replaced("privacy.md", "(8.0000, 1e-05)", "(1.0000, 1e-05)"),
}  # fmt: skip


def _roll_back(run: Path) -> None:
    """The folder as it would be had the run been interrupted before its first round."""
    for path in (run / "ledger").glob("*.jsonl"):
        path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    traces = ("checkpoints/round_00004", "metrics.csv", "classifier.safetensors", "model_card.md")
    remove(run, traces)
    (run / "checkpoints" / "latest").write_text("round_00000\n")
    results = json.loads((run / "results.json").read_text())
    results |= {"status": "interrupted", "rounds": 0, "bytes": {"up": 0, "down": 0}}
    results["test_accuracy"] = {"final": 0.0, "best": 0.0, "best_round": 0}
    results["seconds"]["total"] = 0.0
    (run / "results.json").write_text(json.dumps(results))
    card_anew(run, planned=None, weights=None)


def _empty(path: Path) -> None:
    path.write_text("")


def _rename(run: Path) -> None:
    (run / "ledger" / "m1.jsonl").rename(run / "ledger" / "m7.jsonl")


def _noise(plan: AccountPlan) -> float:
    assert isinstance(plan.event, PoissonSampledGaussianEvent)
    return plan.event.noise_multiplier


@pytest.mark.usefixtures("one_library")
@pytest.mark.parametrize("tamper", SMALLER.values(), ids=SMALLER)
def test_a_smaller_claim_is_violated_or_inconclusive(
    run: Path, tamper: Callable[[Path], None]
) -> None:
    tamper(run)
    report = audit.audit(run)
    assert report.verdict in (Verdict.VIOLATED, Verdict.INCONCLUSIVE), told(report)
    assert told(report)


def test_a_folder_rolled_back_to_an_interruption_is_inconclusive_even_with_its_log_edited(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Editing every file makes the folder of a run that was interrupted there: nothing refutes it,
    so no audit of an interrupted run is CONSISTENT."""
    _roll_back(run)
    doubts = audit.audit(run).doubts
    assert "train.log tells of round 4, results.json of 0 rounds" in doubts
    (run / "train.log").write_text("")
    report = audit.audit(run)
    assert report.verdict == Verdict.INCONCLUSIVE and report.agents[0].claimed == 0
    assert len(report.doubts) == 1 and "nothing here shows that no later" in report.doubts[0]
    monkeypatch.setattr(witnesses, "_interruption", lambda *_: [])
    assert audit.audit(run).verdict == Verdict.CONSISTENT  # negative control: nothing else tells


def test_noise_in_ledgers_and_card_that_the_config_does_not_ask_for_is_violated_and_named(
    run: Path,
) -> None:
    SMALLER["the same, and nobody left to remember"](run)
    report = audit.audit(run)
    assert report.verdict == Verdict.VIOLATED
    assert "config.yaml asks for a visit of" in told(report) and "=4.0" in told(report)


EDITED = {
    "metrics: an epsilon": replaced("metrics.csv", "4.6285", "3.6285"),
    "metrics: the last epsilon": replaced("metrics.csv", "7.9999", "7.0679"),
    "metrics: an accuracy": lambda run: _last_cell(run),
    "metrics: a round is gone": lambda run: _without_line(run, 2),
    "results: accuracy": edit("results.json", "test_accuracy", "final", value=0.99),
    "results: rounds": edit("results.json", "rounds", value=3),
    "results: bytes": edit("results.json", "bytes", "up", value=1),
    "results: seconds": edit("results.json", "seconds", "total", value=1e6),
    "results: seed": edit("results.json", "seed", value=77),
    "results: labels": edit("results.json", "labels", value=4000),
    "card: no hash of the weights": edit("privacy.json", "weights", value=None),
    "config: seed": replaced("config.yaml", "seed: 0", "seed: 5"),
    "config: steps": replaced("config.yaml", "  steps: 5", "  steps: 1"),
    "config: rounds": replaced("config.yaml", "rounds: 4", "rounds: 40"),
    "config: agents": replaced("config.yaml", "mixed: 2", "mixed: 3"),
    "config: no privacy": lambda run: _without_privacy(run),
    "split: a row": replaced("split.json", '"labelled":[', '"labelled":[999,'),
    "checkpoint: a number": replaced(LAST, '"round": 4', '"round": 3'),
    "checkpoint: weights": flipped("checkpoints/round_00004/state.safetensors"),
    "classifier: one bit": flipped("classifier.safetensors"),
    "card: hash of the weights": edit("privacy.json", "weights", "sha256", value="0" * 64),
    "card: other weights": edit("privacy.json", "weights", "file", value="other.safetensors"),
    "results: a number beyond floats": edit("results.json", "bytes", "up", value=10**400),
    "card: an unknown key": lambda run: _with_key(run, "certified_by", "nobody"),
    "card: an unknown key of the task": edit("privacy.json", "task", "rows", value="many"),
    "card: an unknown key of an agent": edit("privacy.json", "agents", 0, "audited", value=True),
    "card: an unknown key of a release": edit("privacy.json", "releases", 0, "epsilon", value=0.1),
    "results: an encoder": edit("results.json", "rows", "encoder", value={"name": "minilm"}),
    "results: a class": edit("results.json", "class_names", value=["0", "1"]),
    "card: planned visits": edit("privacy.json", "planned_visits", value=2),
    "ledger: a number": replaced("ledger/m0.jsonl", '"steps":5', '"steps":1'),
    "ledger: an unknown key": replaced("ledger/m0.jsonl", '"sample_rate"', '"x":1,"sample_rate"'),
    "ledger: one bit": flipped("ledger/m1.jsonl", -40),
}  # fmt: skip


def _last_cell(run: Path) -> None:
    lines = (run / "metrics.csv").read_text().splitlines()
    column = lines[0].split(",").index("test/accuracy")
    cells = lines[-1].split(",")
    cells[column] = "0.99"
    (run / "metrics.csv").write_text("\n".join([*lines[:-1], ",".join(cells)]) + "\n")


def _without_line(run: Path, number: int) -> None:
    lines = (run / "metrics.csv").read_text().splitlines(keepends=True)
    (run / "metrics.csv").write_text("".join(lines[:number] + lines[number + 1 :]))


def _without_privacy(run: Path) -> None:
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text[: text.index("privacy:")] + "privacy: null\n")


def _with_key(run: Path, key: str, value: str) -> None:
    card = json.loads((run / "privacy.json").read_text())
    (run / "privacy.json").write_text(json.dumps({**card, key: value}, indent=2) + "\n")


@pytest.mark.usefixtures("one_library")
def test_an_audit_tells_no_hash_of_a_split_that_was_changed(run: Path) -> None:
    """Of a private split: who knows all but one label could try labels until it matches."""
    EDITED["split: a row"](run)
    said, digest = told(audit.audit(run)), re.compile("[0-9a-f]{12}")
    assert "split.json cannot be used" in said and not digest.search(said)
    with pytest.raises(DataError) as error:
        read_manifest(run / "split.json")
    assert not digest.search(str(error.value))
    assert digest.search((run / "split.json").read_text())  # the control


@pytest.mark.usefixtures("one_library")
@pytest.mark.parametrize("tamper", EDITED.values(), ids=EDITED)
def test_a_file_that_was_edited_is_told_of_and_the_folder_is_not_consistent(
    run: Path, tamper: Callable[[Path], None]
) -> None:
    tamper(run)
    report = audit.audit(run)
    assert report.verdict in (Verdict.VIOLATED, Verdict.INCONCLUSIVE)
    assert told(report)


@pytest.mark.parametrize(
    "tamper",
    [
        edit("privacy.json", "weights", value="these"),
        edit("privacy.json", "agents", 0, "visits", value=None),
        edit("privacy.json", "epsilon", "overall", value=True),
    ],
)
def test_a_card_of_another_form_is_refused_with_the_place(
    run: Path, tamper: Callable[[Path], None]
) -> None:
    tamper(run)
    with pytest.raises(RunFolderError, match=r"not a privacy card \((weights|agents.0|epsilon)"):
        audit.audit(run)


def test_a_card_of_another_version_is_refused_with_its_name(run: Path) -> None:
    edit("privacy.json", "schema", value=1)(run)
    with pytest.raises(RunFolderError, match=r"schema 1 of privssl .* Audit it with that version"):
        audit.audit(run)


def test_the_card_says_the_clip_norm_and_the_audit_compares_it_with_the_config(run: Path) -> None:
    card = json.loads((run / "privacy.json").read_text())
    privacy = config.load_config(run / "config.yaml").privacy
    assert privacy is not None and card["clip_norm"] == privacy.clip_norm
    assert (
        f"Clip norm of one row's gradient: {card['clip_norm']:g}."
        in (run / "privacy.md").read_text()
    )
    edit("privacy.json", "clip_norm", value=0.5)(run)
    assert "the card 0.5" in told(audit.audit(run))


@pytest.mark.usefixtures("one_library")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dataset": "cifar10"}, "config.yaml has the data set toy, the card another"),
        ({"task": {"classes": 2, "shape": [1, 8, 8]}}, "other classes or rows than results.json"),
        ({"task": {"classes": 10, "shape": [3, 32, 32]}}, "other classes or rows"),
        ({"task": None}, "other classes or rows"),
        ({"clip_norm": None}, "the card None"),
        ({}, ""),  # the control: what is written anew alone is no problem
    ],
)
def test_a_card_that_was_written_anew_with_other_public_facts_is_violated(
    run: Path, changes: dict[str, Any], said: str
) -> None:
    """Its page and results.json agree with it."""
    card_anew(run, **changes)
    report = audit.audit(run)
    assert report.verdict == (Verdict.VIOLATED if said else Verdict.CONSISTENT), told(report)
    assert said in told(report)


@pytest.mark.usefixtures("one_library")
def test_a_card_that_forgets_the_ledger_of_a_replaced_run_is_violated(
    finished: Path, tmp_path: Path
) -> None:
    for folder in ("again", "run"):  # beside the second nothing lies
        shutil.copytree(finished, tmp_path / folder)
    shutil.copytree(finished / "ledger", tmp_path / "again.ledger-001")
    record = record_former_ledgers(
        config.load_config(tmp_path / "again" / "config.yaml"), tmp_path / "again"
    )
    heads = {path.stem: read_journal(path).head for path in (finished / "ledger").glob("*.jsonl")}
    assert json.loads(record[FORMER]) == {"again.ledger-001": heads}
    others = {"again.ledger-001": dict.fromkeys(heads, "f" * 64)}
    for mapping, verdict in (
        ({FORMER: "{}"}, Verdict.CONSISTENT),
        (record, Verdict.CONSISTENT),  # this run's ledgers go on with it, and count it
        ({FORMER: '["again.ledger-001"]'}, Verdict.VIOLATED),  # as earlier versions record it
        ({FORMER: json.dumps({"again.ledger-001": {"m0": ""}})}, Verdict.VIOLATED),  # damaged
        ({FORMER: json.dumps(others)}, Verdict.VIOLATED),
    ):
        path = tmp_path / "run" / LAST
        content = json.loads(path.read_text())
        content["extra"]["mapping"] |= mapping
        del content["sha256"]
        path.write_text(json.dumps({**content, "sha256": checkpoint._checksum(content)}))
        report = audit.audit(tmp_path / "run")
        assert report.verdict == verdict, told(report)
    assert "record again.ledger-001, the ledger of a replaced run" in told(report)


@pytest.mark.usefixtures("one_library")
def test_unknown_keys_in_ledgers_are_refused_even_with_hashes_that_fit(run: Path) -> None:
    from accounting import canonical_json
    from accounting.journal import FIRST_PREV, line_hash

    path = run / "ledger" / "m0.jsonl"
    for line_number, key in ((0, "weaker"), (1, "free"), (2, "note")):
        head, lines = FIRST_PREV, []
        for number, line in enumerate((run / "ledger" / "m1.jsonl").read_bytes().splitlines()):
            record = {**json.loads(line), "prev": head}
            if number == line_number:
                record[key] = 1
            content = canonical_json.encode(record)
            lines.append(content)
            head = line_hash(content)
        path.write_bytes(b"\n".join(lines) + b"\n")
        problems = [str(problem) for problem in read_journal(path).problems]
        assert problems and key in problems[0], problems
    assert audit.audit(run).verdict == Verdict.VIOLATED


def test_epsilon_of_the_metrics_is_that_of_the_ledger_after_each_round(run: Path) -> None:
    """Where the check of curves gets its numbers from: the run's own account."""
    journal = read_journal(run / "ledger" / "m0.jsonl")
    course = witnesses._course(journal)
    column = [float(line["dp/epsilon/m0"]) for line in read_metrics(run)]
    assert all(math.isclose(a, b, rel_tol=1e-9) for a, b in zip(course[1:], column, strict=True))


@pytest.mark.usefixtures("one_library")
@pytest.mark.parametrize(
    ("tamper", "said"),
    [
        (
            replaced("config.yaml", "device: auto", "device: cuda:1"),
            "config.yaml says that",
        ),
        (
            replaced("train.log", "Device cpu, torch", "Device cuda, torch"),
            "train.log says that",
        ),
        (replaced("config.yaml", "device: auto", "device: cpu"), None),  # the control
    ],
)
def test_a_guarantee_whose_private_steps_took_a_gpu_is_inconclusive(
    run: Path, tamper: Callable[[Path], None], said: str | None
) -> None:
    tamper(run)
    report = audit.audit(run)
    assert report.verdict == (Verdict.INCONCLUSIVE if said else Verdict.CONSISTENT), told(report)
    assert (said or "") in told(report)
