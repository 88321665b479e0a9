"""A run whose journal is damaged while it runs ends without a guarantee.

A small private run is repeated fifty times: five kinds of damage, in and after each of its five
visits. The true charges are counted independently of the accounts. The control disables the damage
checks: the same damage then gives guarantees far below what was spent.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from accounting import verify
from accounting.errors import AccountingError, LedgerError
from accounting.ledger import Account, read_journal
from privssl.audit import __main__ as audit
from privssl.experiment import config as configs
from privssl.experiment.prepare import Prepared, prepare
from privssl.reporting.trackers import Image, RoundRecord, Tracker
from privssl.runs import round_loop
from tests.support.command_line import Outcome, assert_refused, command
from tests.support.damage import KINDS, ChargeRecord, damage_checks_disabled, damaged

VISITS = 5
DELTA = 1e-5
TINY = """
run: {seed: 0, evaluate_every: 1000, images_every: 1000, device: cpu, checkpoint_every: 2}
data: {name: toy, labelled: 12, unlabelled: 12}
agents: {support: 1, query: 1}
model: {name: small_cnn, width: 1}
algorithm: {name: fedavg, rounds: 5}
privacy: {epsilon: 20.0, noise_multiplier: 4.0, sample_rate: 1.0, steps: 1}
"""
MOMENTS = [
    (kind, visit, when)
    for kind in KINDS
    for visit in range(1, VISITS + 1)
    for when in ("in", "after")
]


class EpsilonTracker(Tracker):
    """A tracker that records the logged epsilon of each round."""

    def __init__(self) -> None:
        self.epsilons: list[float] = []

    def round(self, record: RoundRecord) -> None:
        self.epsilons.append(record.values["dp/epsilon/s0"])

    def images(self, number: int, tag: str, image: Image) -> None:
        return None

    def keep(self) -> None:
        return None

    def close(self) -> None:
        return None


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    path = tmp_path_factory.mktemp("config") / "tiny.yaml"
    path.write_text(TINY)
    return prepare(configs.load_config(path))


@pytest.fixture(autouse=True)
def no_second_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the bounds of dp-accounting, which take seconds per card and are not tested here."""

    def refuse(*_: object) -> None:
        raise AccountingError("left out")

    monkeypatch.setattr(verify, "pld_bracket", refuse)


class FinishedRun:
    """Train a run to its end; keep its error, results and card."""

    def __init__(self, prepared: Prepared, folder: Path) -> None:
        self.folder, self.error, tracker = folder, "", EpsilonTracker()
        folder.mkdir()
        try:
            round_loop.train(prepared, folder, lambda: [tracker], None)
        except LedgerError as error:
            self.error = str(error)
        self.epsilons = tracker.epsilons
        self.results = self._read("results.json")
        self.card = self._read("privacy.json")
        self.guarantee = self.results["privacy"]["guarantee"]

    def _read(self, name: str) -> Any:
        return json.loads((self.folder / name).read_text())


def test_there_are_fifty_moments_of_damage() -> None:
    assert len(set(MOMENTS)) == 50


@pytest.mark.parametrize("kind, visit, when", MOMENTS)
def test_damage_at_any_moment_ends_without_a_guarantee(
    prepared: Prepared, tmp_path: Path, kind: str, visit: int, when: str
) -> None:
    with damaged(kind, visit, when, seed=MOMENTS.index((kind, visit, when))) as record:
        ended = FinishedRun(prepared, tmp_path / "run")
    assert record.at_damage == visit
    assert ended.guarantee is ended.card["guarantee"] is ended.card["headline"] is None
    assert ended.error.startswith("NO GUARANTEE") and ended.error == ended.card["sentence"]
    assert ended.error in (tmp_path / "run/privacy.md").read_text()
    assert ended.results["status"] == "interrupted"
    assert ended.results["privacy"]["problems"] == ended.card["ledger_problems"] != []
    # The epsilon of the card is at least what was charged, and never falls between rounds.
    assert ended.card["epsilon"]["overall"] >= record.spent(DELTA) - 1e-9
    assert ended.epsilons == sorted(ended.epsilons)
    # A flipped bit may be noticed late, with the next line. All other damage stops the next visit.
    assert len(record.entered) == visit or kind == "flip"


def test_control_without_damage_the_run_has_its_guarantee(
    prepared: Prepared, tmp_path: Path
) -> None:
    with damaged("", 0, "in") as record:
        ended = FinishedRun(prepared, tmp_path / "run")
    assert ended.error == "" and ended.results["status"] == "finished"
    assert ended.guarantee["epsilon"] == pytest.approx(record.spent(DELTA))
    assert set(ended.results["privacy"]) == {"guarantee", "nominal_epsilon", "scope"}


def test_control_without_damage_checks_the_card_claims_less_than_was_spent(
    prepared: Prepared, tmp_path: Path
) -> None:
    understated = set()
    for number, (kind, visit, when) in enumerate(MOMENTS):
        if kind in ("flip", "cut", "replace") and visit == 4:
            with damage_checks_disabled(), damaged(kind, visit, when, seed=number) as record:
                ended = FinishedRun(prepared, tmp_path / str(number))
            assert ended.error == ""
            if ended.card["epsilon"]["overall"] < record.spent(DELTA) / 1.5:
                understated.add(kind)
    assert understated == {"flip", "cut", "replace"}


def test_charges_that_only_the_damaged_file_records_count_as_well(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def claim_nine_more_visits(account: Account) -> None:
        account._file._unsure = b""
        journal = read_journal(account._file.path)
        journal.events += [journal.plan.event] * 9
        journal.cost = journal.plan.cost(journal.events)
        monkeypatch.setattr("accounting.ledger.read_journal", lambda path: journal)

    real = Account.balance

    def balance(self: Account) -> Any:
        claim_nine_more_visits(self)
        monkeypatch.setattr(self._file, "damage", lambda: "bytes were added by another writer")
        return real(self)

    monkeypatch.setattr(Account, "balance", balance)
    ended = FinishedRun(prepared, tmp_path / "run")
    plan = prepared.account_plans["s0"]
    assert ended.card["epsilon"]["overall"] == plan.epsilon(plan.visit_cost.times(VISITS + 9))


# The command ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def damaged_run(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Path, Outcome, ChargeRecord]]:
    """A run of the command whose journal was replaced by an older copy after visit 3."""
    folder = tmp_path_factory.mktemp("command")
    (folder / "tiny.yaml").write_text(TINY)
    true_ledger = folder / "true.jsonl"
    real = KINDS["replace"]

    def keep(path: Path, older: bytes, chance: Any) -> None:
        true_ledger.write_bytes(path.read_bytes())
        real(path, older, chance)

    with pytest.MonkeyPatch.context() as patch, damaged("replace", 3, "after") as record:
        patch.setitem(KINDS, "replace", keep)
        outcome = command(folder / "tiny.yaml", f"run.output={folder / 'run'}", "--quiet")
    yield folder, outcome, record


def test_the_command_ends_with_no_guarantee_and_status_2(
    damaged_run: tuple[Path, Outcome, ChargeRecord],
) -> None:
    folder, outcome, record = damaged_run
    assert_refused(outcome, "s0.jsonl", "NO GUARANTEE", "Put the true ledger back", "--resume")
    assert outcome.err.rstrip().splitlines()[-1].startswith("NO GUARANTEE")
    assert f"epsilon {record.spent(DELTA):.3f}" in outcome.err
    assert not any("GUARANTEE:" in t.replace("NO GUARANTEE:", "") for t in outcome.err.split("\n"))
    assert audit.audit(folder / "run").verdict == audit.Verdict.VIOLATED


def test_with_the_true_ledger_restored_the_run_resumes_to_its_guarantee(
    damaged_run: tuple[Path, Outcome, ChargeRecord],
) -> None:
    folder, _, record = damaged_run
    ledger = folder / "run/ledger/s0.jsonl"
    assert_refused(command("--resume", folder / "run", "--quiet"), "s0", "true")  # not restored yet
    ledger.write_bytes((folder / "true.jsonl").read_bytes())
    report = audit.audit(folder / "run")
    assert report.verdict == audit.Verdict.NO_GUARANTEE  # valid, but the card has no guarantee
    outcome = command("--resume", folder / "run", "--quiet")
    assert outcome.status == 0, outcome
    results = json.loads((folder / "run/results.json").read_text())
    spent = read_journal(ledger).epsilon
    assert results["privacy"]["guarantee"]["epsilon"] == pytest.approx(spent)
    assert spent > record.spent(DELTA)
    assert audit.audit(folder / "run").verdict == audit.Verdict.CONSISTENT
