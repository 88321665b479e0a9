"""Editing the folder of a finished run is reported, or makes the claim larger.

Each tampering changes a copy of one private toy run: files are deleted, numbers edited, or ledgers
and card rewritten with valid hashes. No changed folder is CONSISTENT without a note, and no smaller
claim is CONSISTENT at all. Negative controls: the unchanged folder is CONSISTENT, and without the
check of witnesses a deleted witness goes unnoticed.
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
#: Without one of these the claim cannot be checked.
WITNESSES = ("config.yaml", "results.json", "metrics.csv", "checkpoints", "classifier.safetensors")
#: The claim can be checked without these.
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
    """Disable dp-accounting, which takes a second per new list of releases. Tampering must be
    detected without it.
    """
    monkeypatch.setattr(verify, "available", lambda: False)


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


def remove(run: Path, names: Iterable[str]) -> None:
    for name in names:
        path = run / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def findings(report: Report) -> str:
    parts = [*report.problems, *report.doubts, *report.notes]
    return "\n".join([*parts, *(text for a in report.agents for text in a.problems)])


def edit(name: str, *keys: Any, value: Any) -> Callable[[Path], None]:
    """Set a value in a JSON file. A function as value gets the old value."""

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


# Rewriting files with valid hashes ---------------------------------------------------------------


def rewrite_card(run: Path, **changes: Any) -> None:
    """Write privacy.json, privacy.md and results.json for the present ledgers."""
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


def rewrite_ledgers(
    change: Callable[[AccountPlan], AccountPlan] = lambda plan: plan, visits: int = 4, **card: Any
) -> Callable[[Path], None]:
    """Ledgers of other plans or fewer visits, written by a real account, and their card."""

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
        rewrite_card(run, **card)

    return tamper


def with_event(**changes: Any) -> Callable[[AccountPlan], AccountPlan]:
    def change(plan: AccountPlan) -> AccountPlan:
        assert isinstance(plan.event, PoissonSampledGaussianEvent)
        return replace(plan, event=replace(plan.event, **changes))

    return change


def rewrite_checkpoints(run: Path) -> None:
    """The ledger heads in checkpoints, with valid checksums."""
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


# The unchanged folder ----------------------------------------------------------------------------


def test_an_unchanged_folder_is_consistent_without_notes(run: Path) -> None:
    report = audit.audit(run)
    assert report.verdict == Verdict.CONSISTENT
    assert findings(report) == ""
    assert report.agents[0].claimed == pytest.approx(8.0, abs=1e-3)


@pytest.mark.usefixtures("one_library")
def test_without_the_second_library_an_unchanged_folder_is_consistent_with_a_note(
    run: Path,
) -> None:
    # The control of all tests below that disable the second library.
    report = audit.audit(run)
    assert report.verdict == Verdict.CONSISTENT
    assert findings(report) == "dp-accounting is not installed: no second library"


@pytest.mark.parametrize("name", ["weights", "clip_norm", "encoder", "network"])
def test_a_card_without_a_field_of_its_schema_version_is_refused(run: Path, name: str) -> None:
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


def test_a_folder_without_some_of_the_witnesses_is_inconclusive(
    finished: Path, tmp_path: Path
) -> None:
    subsets = [s for n in range(1, 6) for s in itertools.combinations(WITNESSES, n)]
    assert len(subsets) == 31
    for number, names in enumerate(subsets):
        run = shutil.copytree(finished, tmp_path / str(number))
        remove(run, names)
        report = audit.audit(run)
        assert report.verdict == Verdict.INCONCLUSIVE, names
        assert all(name in findings(report) for name in names), (names, findings(report))


def test_missing_files_that_are_no_witnesses_are_noted(finished: Path, tmp_path: Path) -> None:
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
    rewrite_ledgers(visits=2)(cut)
    for number, names in enumerate(
        s for n in range(6) for s in itertools.combinations(WITNESSES, n)
    ):
        run = shutil.copytree(cut, tmp_path / str(number))
        remove(run, names)
        report = audit.audit(run)
        assert report.agents[0].claimed == pytest.approx(5.993, abs=1e-3)
        assert report.verdict in (Verdict.VIOLATED, Verdict.INCONCLUSIVE), names


def test_without_the_check_of_witnesses_a_deleted_one_goes_unnoticed(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: cut to 2 visits of 4, and nothing else records more."""
    all_of(
        rewrite_ledgers(visits=2, planned=None),
        without("checkpoints", "metrics.csv", "results.json", "model_card.md"),
    )(run)
    assert audit.audit(run).verdict == Verdict.INCONCLUSIVE
    monkeypatch.setattr(witnesses, "check", lambda *_: None)
    assert audit.audit(run).verdict == Verdict.CONSISTENT


# Editing -----------------------------------------------------------------------------------------

SMALLER = {
    "noise of the review: 4 in ledgers and card": rewrite_ledgers(with_event(noise_multiplier=4.0)),
    "the same, and nobody left to remember": all_of(
        rewrite_ledgers(with_event(noise_multiplier=4.0)),
        without("checkpoints", "metrics.csv", "results.json"),
    ),
    "two ticks more noise": all_of(
        rewrite_ledgers(lambda plan: with_event(noise_multiplier=_noise(plan) + 2e-4)(plan)),
        without("checkpoints", "metrics.csv"),
    ),
    "a smaller sample rate": all_of(
        rewrite_ledgers(with_event(sample_rate=0.1)), without("checkpoints")
    ),
    "fewer steps": all_of(
        rewrite_ledgers(with_event(steps=1)), without("checkpoints", "metrics.csv")
    ),
    "fewer visits": all_of(rewrite_ledgers(visits=2), without("checkpoints", "metrics.csv")),
    "fewer visits, also planned": all_of(
        rewrite_ledgers(visits=2, planned=2), without("checkpoints", "metrics.csv")
    ),
    "a smaller budget": all_of(
        rewrite_ledgers(lambda plan: replace(plan, budget=Budget(6.0, 1e-5)), visits=2),
        without("checkpoints", "metrics.csv"),
    ),
    "a larger delta": all_of(
        rewrite_ledgers(lambda plan: replace(plan, budget=Budget(8.0, 1e-3))),
        without("checkpoints", "metrics.csv"),
    ),
    "no visit at all": all_of(
        rewrite_ledgers(visits=0), rewrite_checkpoints, without("metrics.csv")
    ),
    "checkpoints sealed anew": all_of(rewrite_ledgers(visits=2), rewrite_checkpoints),
    "checkpoints sealed anew, curves gone": all_of(
        rewrite_ledgers(visits=2), rewrite_checkpoints, without("metrics.csv")
    ),
    "said to be interrupted": all_of(
        rewrite_ledgers(visits=2, planned=None, weights=None),
        edit("results.json", "status", value="interrupted"),
        without("checkpoints", "metrics.csv", "classifier.safetensors"),
    ),
    "said to have no budget left": all_of(
        rewrite_ledgers(visits=2), rewrite_checkpoints, without("metrics.csv"),
        edit("results.json", "status", value="budget_exhausted"),
    ),
    "only the first checkpoint is left": all_of(
        rewrite_ledgers(visits=2), without("checkpoints/round_00004", "metrics.csv"),
    ),
    "rolled back to the first checkpoint": all_of(lambda run: _roll_back(run)),
    "the same, and no log": all_of(lambda run: _roll_back(run), without("train.log")),
    "the same, and the log edited": all_of(
        lambda run: _roll_back(run), lambda run: _empty(run / "train.log")
    ),
    "noise in the config as well": all_of(
        replaced("config.yaml", "noise_multiplier: null", "noise_multiplier: 4.0"),
        rewrite_ledgers(with_event(noise_multiplier=4.0)),
        without("metrics.csv"),
    ),
    "noise in the config as well, checkpoints gone": all_of(
        replaced("config.yaml", "noise_multiplier: null", "noise_multiplier: 4.0"),
        rewrite_ledgers(with_event(noise_multiplier=4.0)),
        without("checkpoints"),
    ),
    "one agent forgotten": all_of(
        without("ledger/m1.jsonl"), rewrite_card, without("checkpoints", "metrics.csv")
    ),
    "agents renamed": lambda run: _rename(run),
    "the card alone": edit("privacy.json", "epsilon", "overall", value=1.0),
    "the guarantee alone": edit("privacy.json", "guarantee", "epsilon", value=1.0),
    "the results alone": edit("results.json", "privacy", "guarantee", "epsilon", value=1.0),
    "the page alone": replaced("privacy.md", "(8.0000, 1e-05)", "(1.0000, 1e-05)"),
}  # fmt: skip


def _roll_back(run: Path) -> None:
    """Change the folder to that of a run interrupted before its first round."""
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
    rewrite_card(run, planned=None, weights=None)


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
    assert report.verdict in (Verdict.VIOLATED, Verdict.INCONCLUSIVE), findings(report)
    assert findings(report)


def test_a_folder_rolled_back_to_an_interruption_is_inconclusive_even_with_an_edited_log(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every file edited, the folder equals that of a run interrupted there. Nothing refutes
    it, so an audit of an interrupted run is never CONSISTENT.
    """
    _roll_back(run)
    doubts = audit.audit(run).doubts
    assert "train.log tells of round 4, results.json of 0 rounds" in doubts
    (run / "train.log").write_text("")
    report = audit.audit(run)
    assert report.verdict == Verdict.INCONCLUSIVE and report.agents[0].claimed == 0
    assert len(report.doubts) == 1 and "nothing here shows that no later" in report.doubts[0]
    monkeypatch.setattr(witnesses, "_find_interruption", lambda *_: [])
    # negative control: no other check detects it
    assert audit.audit(run).verdict == Verdict.CONSISTENT


def test_noise_in_ledgers_and_card_that_differs_from_the_config_is_violated_and_named(
    run: Path,
) -> None:
    SMALLER["the same, and nobody left to remember"](run)
    report = audit.audit(run)
    assert report.verdict == Verdict.VIOLATED
    assert "config.yaml asks for a visit of" in findings(report) and "=4.0" in findings(report)


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
def test_an_audit_prints_no_hash_of_an_edited_split(run: Path) -> None:
    """A hash of a private split would let the last unknown label be found by trying."""
    EDITED["split: a row"](run)
    said, digest = findings(audit.audit(run)), re.compile("[0-9a-f]{12}")
    assert "split.json cannot be used" in said and not digest.search(said)
    with pytest.raises(DataError) as error:
        read_manifest(run / "split.json")
    assert not digest.search(str(error.value))
    assert digest.search((run / "split.json").read_text())  # the control


@pytest.mark.usefixtures("one_library")
@pytest.mark.parametrize("tamper", EDITED.values(), ids=EDITED)
def test_an_edited_file_is_reported_and_the_folder_is_not_consistent(
    run: Path, tamper: Callable[[Path], None]
) -> None:
    tamper(run)
    report = audit.audit(run)
    assert report.verdict in (Verdict.VIOLATED, Verdict.INCONCLUSIVE)
    assert findings(report)


@pytest.mark.parametrize(
    "tamper",
    [
        edit("privacy.json", "weights", value="these"),
        edit("privacy.json", "agents", 0, "visits", value=None),
        edit("privacy.json", "epsilon", "overall", value=True),
    ],
)
def test_a_card_with_an_invalid_field_is_refused_with_the_field(
    run: Path, tamper: Callable[[Path], None]
) -> None:
    tamper(run)
    with pytest.raises(RunFolderError, match=r"not a privacy card \((weights|agents.0|epsilon)"):
        audit.audit(run)


def test_a_card_of_another_version_is_refused_with_that_version(run: Path) -> None:
    edit("privacy.json", "schema", value=1)(run)
    with pytest.raises(RunFolderError, match=r"schema 1 of privssl .* Audit it with that version"):
        audit.audit(run)


def test_the_card_contains_the_clip_norm_and_the_audit_compares_it_with_the_config(
    run: Path,
) -> None:
    card = json.loads((run / "privacy.json").read_text())
    privacy = config.load_config(run / "config.yaml").privacy
    assert privacy is not None and card["clip_norm"] == privacy.clip_norm
    assert (
        f"Clip norm of one row's gradient: {card['clip_norm']:g}."
        in (run / "privacy.md").read_text()
    )
    edit("privacy.json", "clip_norm", value=0.5)(run)
    assert "the card 0.5" in findings(audit.audit(run))


@pytest.mark.usefixtures("one_library")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dataset": "cifar10"}, "config.yaml has the data set toy, the card another"),
        ({"task": {"classes": 2, "shape": [1, 8, 8]}}, "other classes or rows than results.json"),
        ({"task": {"classes": 10, "shape": [3, 32, 32]}}, "other classes or rows"),
        ({"task": None}, "other classes or rows"),
        ({"clip_norm": None}, "the card None"),
        ({}, ""),  # the control: rewriting alone is no problem
    ],
)
def test_a_card_rewritten_with_other_public_facts_is_violated(
    run: Path, changes: dict[str, Any], said: str
) -> None:
    """Its page and results.json agree with it."""
    rewrite_card(run, **changes)
    report = audit.audit(run)
    assert report.verdict == (Verdict.VIOLATED if said else Verdict.CONSISTENT), findings(report)
    assert said in findings(report)


@pytest.mark.usefixtures("one_library")
def test_a_card_that_omits_the_ledger_of_a_replaced_run_is_violated(
    finished: Path, tmp_path: Path
) -> None:
    for folder in ("again", "run"):  # no ledger lies beside the second
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
        (record, Verdict.CONSISTENT),  # this run continues these ledgers and counts them
        ({FORMER: '["again.ledger-001"]'}, Verdict.VIOLATED),  # as earlier versions record it
        ({FORMER: json.dumps({"again.ledger-001": {"m0": ""}})}, Verdict.VIOLATED),  # damaged
        ({FORMER: json.dumps(others)}, Verdict.VIOLATED),
    ):
        path = tmp_path / "run" / LAST
        content = json.loads(path.read_text())
        content["extra"]["mapping"] |= mapping
        del content["sha256"]
        path.write_text(json.dumps({**content, "sha256": checkpoint._compute_checksum(content)}))
        report = audit.audit(tmp_path / "run")
        assert report.verdict == verdict, findings(report)
    assert "record again.ledger-001, the ledger of a replaced run" in findings(report)


@pytest.mark.usefixtures("one_library")
def test_unknown_keys_in_ledgers_are_refused_even_with_valid_hashes(run: Path) -> None:
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


def test_epsilon_in_the_metrics_equals_that_of_the_ledger_after_each_round(run: Path) -> None:
    """The check of metrics uses these numbers: the run's own account."""
    journal = read_journal(run / "ledger" / "m0.jsonl")
    epsilons = witnesses._compute_epsilons(journal)
    column = [float(line["dp/epsilon/m0"]) for line in read_metrics(run)]
    assert all(math.isclose(a, b, rel_tol=1e-9) for a, b in zip(epsilons[1:], column, strict=True))


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
def test_a_guarantee_with_private_steps_on_a_gpu_is_inconclusive(
    run: Path, tamper: Callable[[Path], None], said: str | None
) -> None:
    tamper(run)
    report = audit.audit(run)
    assert report.verdict == (Verdict.INCONCLUSIVE if said else Verdict.CONSISTENT), findings(
        report
    )
    assert (said or "") in findings(report)
