"""Accounts that outlive a run (``privacy.ledger``): several runs, one budget for each row.

The runs are real and tiny. Every promise has its control: without it the same steps go through.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accounting.accountants import epsilon
from accounting.budget import round_up
from accounting.errors import LedgerError
from accounting.events import PoissonSampledGaussianEvent
from accounting.ledger import read_journal
from privssl.audit import __main__ as audit
from privssl.data.datasets import load_dataset
from privssl.errors import ConfigError
from privssl.experiment import config
from privssl.experiment.prepare import prepare
from privssl.privacy.card_text import render_markdown
from privssl.runs import accounts, checkpoint, round_loop
from privssl.runs.accounts import open_accounts
from privssl.settings.schema import DataSettings
from tests.support.command_line import assert_refused, command, tree
from tests.support.private_fedssl import FULL_BATCHES

TINY = FULL_BATCHES.replace("epsilon: 50.0", "epsilon: 4.0")
VISIT = PoissonSampledGaussianEvent(noise_multiplier=4.0, sample_rate=1.0, steps=2)
DELTA = 1e-5
AS_PUBLISHED = (
    "privacy.update_at_support=[F, D, G]", "privacy.protect=[G]",
    "privacy.acknowledge_unsound=true",
)  # fmt: skip


def cost(visits: int) -> float:
    return epsilon([VISIT] * visits, DELTA)


class Workplace:
    """A folder with a config, an account folder, and runs that draw from it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.ledger = folder, folder / "accounts"
        (folder / "tiny.yaml").write_text(TINY)

    def run(self, name: str) -> Path:
        return self.folder / name

    def train(self, name: str, *overrides: str, total: float = 8.0, **flags: Any) -> Any:
        """``python -m privssl.train``; later runs use the first one's split."""
        chosen = {
            "run.output": str(self.run(name)),
            "privacy.ledger": str(self.ledger),
            "privacy.ledger_epsilon": str(total),
        }
        if name != "one" and (self.run("one") / "split.json").exists():
            chosen["data.split"] = str(self.run("one") / "split.json")
        for override in overrides:
            key, _, value = override.partition("=")
            chosen[key] = value
        given = [f"{key}={value}" for key, value in chosen.items() if value]
        resume = ["--resume", flags["resume"]] if "resume" in flags else []
        return command(self.folder / "tiny.yaml", *given, "--quiet", *resume)

    def trained(self, name: str, *overrides: str, **given: Any) -> dict[str, Any]:
        """A run that came to its end; its card."""
        outcome = self.train(name, *overrides, **given)
        assert outcome.status == 0, outcome
        return self.card(name)

    def card(self, name: str) -> dict[str, Any]:
        card: dict[str, Any] = json.loads((self.run(name) / "privacy.json").read_text())
        return card

    def status(self, name: str) -> str:
        return str(json.loads((self.run(name) / "results.json").read_text())["status"])

    def visits(self, agent: str = "s0") -> int:
        return len(read_journal(self.ledger / f"{agent}.jsonl").events)


@pytest.fixture
def work(tmp_path: Path) -> Workplace:
    return Workplace(tmp_path)


@pytest.fixture(scope="module")
def _once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = Workplace(tmp_path_factory.mktemp("once"))
    place.trained("one")
    return place.folder


@pytest.fixture
def after_one(_once: Path, monkeypatch: pytest.MonkeyPatch) -> Workplace:
    """One run of two visits to each agent has been; put back after each test."""
    place = Workplace(_once)
    kept = _once.with_name("kept")
    if not kept.exists():
        shutil.copytree(_once, kept)
    shutil.rmtree(_once)
    shutil.copytree(kept, _once)
    return place


Audit = Callable[..., tuple[int, str]]


@pytest.fixture
def audited(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Audit:
    from accounting import verify

    monkeypatch.setattr(verify, "available", lambda: False)  # it takes a second

    def run_it(run: Path) -> tuple[int, str]:
        capsys.readouterr()
        status = audit.main([str(run)])
        return status, " ".join(capsys.readouterr().out.split())

    return run_it


# One budget for all runs ------------------------------------------------------------------------


def test_a_second_run_draws_from_the_same_account_and_its_card_counts_both(
    after_one: Workplace,
) -> None:
    first = after_one.card("one")
    assert first["this_run"] == pytest.approx({"s0": cost(2), "s1": cost(2)})
    card = after_one.trained("two", "run.seed=7")
    assert card["epsilon"]["overall"] == pytest.approx(cost(4))
    assert card["guarantee"]["epsilon"] == 8.0  # who planned the second run had seen the first
    assert [entry["visits"] for entry in card["agents"]] == [4, 4]
    assert card["this_run"] == pytest.approx({"s0": cost(2), "s1": cost(2)})
    page = (after_one.run("two") / "privacy.md").read_text()
    assert "The accounts outlive this run" in page
    assert f"charged epsilon {round_up(cost(4))}" in page and "(8.0000, 1e-05)-DP" in page
    assert not list(after_one.run("two").glob("ledger/registry"))  # it stays with the rows


@pytest.mark.parametrize("here", [True, False], ids=["the account is here", "it is elsewhere"])
def test_a_finished_runs_copy_has_every_line_that_its_checkpoints_record(
    here: bool, after_one: Workplace, audited: Audit
) -> None:
    after_one.trained("two", "run.seed=7")
    if not here:
        after_one.ledger.rename(after_one.folder / "elsewhere")
    assert audited(after_one.run("two"))[0] == 0
    for copy in after_one.run("two").glob("ledger/*.jsonl"):  # the first run's: it spent less
        shutil.copy(after_one.run("one") / "ledger" / copy.name, copy)
    status, said = audited(after_one.run("two"))
    assert status == 1 and "was cut or replaced: checkpoint" in said


def test_without_a_common_account_each_run_counts_its_own(after_one: Workplace) -> None:
    # The control: the same second run with accounts of its own says nothing of the first.
    card = after_one.trained("two", "run.seed=7", "privacy.ledger=", "privacy.ledger_epsilon=")
    assert card["guarantee"]["epsilon"] == pytest.approx(cost(2))
    assert card["this_run"] is None


def test_the_accounts_budget_ends_the_visits_of_a_later_run(work: Workplace) -> None:
    total = (cost(5) + cost(6)) / 2  # pays for five visits
    small = f"privacy.epsilon={(cost(3) + cost(4)) / 2}"
    for name in ("one", "two"):
        work.trained(name, small, total=total)
        assert work.status(name) == "finished"
    card = work.trained("three", small, total=total)
    assert work.status("three") == "budget_exhausted"
    assert work.visits() == 5
    assert card["epsilon"]["overall"] == pytest.approx(cost(5))
    assert card["guarantee"]["epsilon"] == pytest.approx(total)
    assert card["this_run"]["s0"] == pytest.approx(cost(1))


def test_a_runs_own_limit_holds_although_the_account_has_more(work: Workplace) -> None:
    limit = (cost(2) + cost(3)) / 2
    work.trained("one", "algorithm.rounds=4", f"privacy.epsilon={limit}", total=50.0)
    assert work.status("one") == "budget_exhausted"
    assert work.visits() == 2
    work.trained("two", "algorithm.rounds=4", f"privacy.epsilon={cost(4)}", total=50.0)
    assert work.visits() == 2 + 4  # the control: the limit was the run's, not the account's


def test_a_runs_own_limit_holds_over_a_kill_and_a_resume(
    work: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = (cost(3) + cost(4)) / 2
    overrides = ("algorithm.rounds=6", f"privacy.epsilon={limit}")
    real = checkpoint.save_snapshot

    def dies(folder: Path, snapshot: Any) -> None:
        if snapshot.round == 2:  # two visits of each agent are paid for, one is in a checkpoint
            raise MemoryError("killed")
        real(folder, snapshot)

    monkeypatch.setattr(checkpoint, "save_snapshot", dies)
    with pytest.raises(MemoryError):
        work.train("one", *overrides, total=50.0)
    monkeypatch.setattr(checkpoint, "save_snapshot", real)
    assert work.visits() == 2
    outcome = work.train("one", *overrides, total=50.0, resume=work.run("one"))
    assert outcome.status == 0, outcome
    assert work.visits() == 3  # not three more
    assert work.card("one")["this_run"]["s0"] == pytest.approx(cost(3))
    journal = read_journal(work.ledger / "s0.jsonl")
    assert len(set(journal.runs)) == 1


# What is refused, with nothing spent -------------------------------------------------------------


def untouched(work: Workplace, name: str, *overrides: str, words: str, **given: Any) -> None:
    """The run is refused in these words; no account and no run folder has changed."""
    before = tree(work.folder)
    assert_refused(work.train(name, *overrides, **given), words)
    assert tree(work.folder) == before
    assert not (work.run(name) / "checkpoints").exists() or name == "one"


#: The same 24 rows, but three agents hold them.
ANOTHER_SPLIT = ("agents.support=3", "data.split=")


def test_another_split_is_refused(after_one: Workplace) -> None:
    untouched(after_one, "two", *ANOTHER_SPLIT, words="would be in the accounts of s0 and")
    assert not after_one.run("two").exists()


def test_another_split_does_not_even_replace_the_former_run(after_one: Workplace) -> None:
    overrides = (*ANOTHER_SPLIT, "run.overwrite=true")
    untouched(after_one, "one", *overrides, words="would be in the accounts of s0 and")


@pytest.mark.parametrize(
    ("override", "given", "words"),
    [
        ("run.seed=1", {"total": 9.0}, "the budget cannot rise from 8 to 9"),
        ("privacy.delta=0.001", {}, "delta cannot change from 1e-05 to 0.001"),
        ("privacy.delta=1.0e-06", {}, "delta cannot change from 1e-05 to 1e-06"),
        ("privacy.record_counts=private", {}, "adjacency cannot change"),
    ],
)
def test_what_would_break_the_accounts_promise_is_refused(
    after_one: Workplace, override: str, given: dict[str, Any], words: str
) -> None:
    untouched(after_one, "two", override, words=words, **given)


def test_a_smaller_budget_is_no_broken_promise(after_one: Workplace, audited: Audit) -> None:
    card = after_one.trained("two", total=7.0)
    assert card["agents"][0]["budget"]["epsilon"] == 7.0
    # Who lowered it had seen a run: what holds whatever was seen is what the account began with.
    assert card["guarantee"]["epsilon"] == 8.0
    assert audited(after_one.run("two"))[0] == 0
    card["guarantee"]["epsilon"] = 7.0
    (after_one.run("two") / "privacy.json").write_text(json.dumps(card))
    status, shown = audited(after_one.run("two"))
    assert status == 1
    assert "the card claims epsilon 7.000000" in shown


def test_a_sound_run_after_the_published_scheme_is_refused(work: Workplace) -> None:
    card = work.trained("one", *AS_PUBLISHED)
    assert card["guarantee"] is None
    untouched(work, "two", words="scope cannot change from as_published to sound")


def test_the_published_scheme_after_a_sound_run_is_refused(after_one: Workplace) -> None:
    untouched(after_one, "two", *AS_PUBLISHED, words="scope cannot change from sound")


def test_a_second_run_at_the_same_time_is_refused(after_one: Workplace) -> None:
    holder = command_config(after_one, "two")
    after_one.run("two").mkdir()
    with open_accounts(prepare(holder), after_one.run("two"), None):
        spent = [after_one.visits(agent) for agent in ("s0", "s1")]
        assert_refused(after_one.train("three"), "another process is using this account")
        assert [after_one.visits(agent) for agent in ("s0", "s1")] == spent
    assert after_one.trained("three", "run.overwrite=true")["agents"][0]["visits"] == 4


def command_config(work: Workplace, name: str) -> config.Config:
    return config.load_config(
        work.folder / "tiny.yaml",
        [
            f"run.output={work.run(name)}", f"privacy.ledger={work.ledger}",
            "privacy.ledger_epsilon=8.0", f"data.split={work.run('one') / 'split.json'}",
        ],
    )  # fmt: skip


def test_replacing_a_run_refunds_nothing(after_one: Workplace) -> None:
    card = after_one.trained("one", "run.overwrite=true")
    assert [entry["visits"] for entry in card["agents"]] == [4, 4]
    assert card["this_run"]["s0"] == pytest.approx(cost(2))


def test_a_card_that_forgets_a_replaced_run_with_an_account_of_its_own_is_violated(
    work: Workplace, audited: Audit
) -> None:
    work.trained("one", "privacy.ledger=", "privacy.ledger_epsilon=")
    card = work.trained("one", "run.overwrite=true")  # from here on accounts outlive the runs
    assert [entry["ledger"] for entry in card["former_ledgers"]] == ["one.ledger-001"] * 2
    work.trained("one", "run.overwrite=true")
    assert audited(work.run("one"))[0] == 0  # the control: what the account goes on with is in it
    card = work.card("one") | {"former_ledgers": []}
    for number in (1, 2):
        shutil.rmtree(work.folder / f"one.ledger-00{number}")
    (work.run("one") / "privacy.json").write_text(json.dumps(card))
    (work.run("one") / "privacy.md").write_text(render_markdown(card))
    (work.run("one") / "model_card.md").unlink()
    status, shown = audited(work.run("one"))
    assert status == 1
    assert "record one.ledger-001, the ledger of a replaced run" in shown


@pytest.mark.parametrize("place", ["", "ledger", "deep/er"])
def test_accounts_within_the_folder_of_a_run_are_refused(after_one: Workplace, place: str) -> None:
    # They would go when the run is replaced, and all that was spent would be forgotten.
    for name in ("one", "two"):
        inside = after_one.run(name) / place
        mine = "run.overwrite=true" if name == "one" else "run.seed=3"
        untouched(after_one, name, f"privacy.ledger={inside}", mine, words="the folder of a run")
        assert not (after_one.run(name) / "registry").exists()
    other = after_one.run("one") / place  # of another run than the one that is asked for
    untouched(after_one, "three", f"privacy.ledger={other}", words="the folder of a run")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("ledger: accounts", "privacy.ledger_epsilon"),
        ("ledger_epsilon: 8.0", "privacy.ledger "),
        ("ledger: accounts, ledger_epsilon: 3.0", "at least epsilon (4)"),
        ("ledger: accounts, ledger_epsilon: .inf", "at least epsilon (4)"),
    ],
)
def test_a_ledger_and_its_budget_are_given_together(tmp_path: Path, line: str, words: str) -> None:
    text = TINY.replace("privacy: {", f"privacy: {{{line}, ")
    (tmp_path / "tiny.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        config.load_config(tmp_path / "tiny.yaml")
    assert words in f"{caught.value} "
    number = 1 + text.splitlines().index(next(s for s in text.splitlines() if "privacy" in s))
    assert f"line {number}" in str(caught.value)


# Rows beside the accounts ------------------------------------------------------------------------

#: One agent holds all labelled rows and every other row is used without noise, whatever the split.
#: So a row that leaves the labelled ones is an unlabelled one, and never another agent's.
ALONE = ("agents.support=1", "data.unlabelled=null", "data.split=")
OTHER_USES = {
    "rows of the account become unlabelled": ("data.labelled=12",),
    "unlabelled rows get an account": ("data.labelled=36",),
    # One row of the account at most is unlabelled and twelve are labelled: eleven are neither.
    "rows of the account become validation rows": (
        "data.labelled=12", "data.validation=REST", "data.unlabelled=1",
    ),
    "without visits, so that only unlabelled rows are used": (
        "data.labelled=12", "privacy.epsilon=0.0",
    ),
}  # fmt: skip


def accept(work: Workplace, name: str, *overrides: str) -> None:
    """What a run does before its first visit: it puts its rows under the accounts."""
    chosen = [text for text in (*ALONE, *overrides) if text != "data.split="]
    last = {text.partition("=")[0]: text for text in chosen}  # an override may be given once
    given = [
        f"run.output={work.run(name)}", f"privacy.ledger={work.ledger}",
        "privacy.ledger_epsilon=8.0", *last.values(),
    ]  # fmt: skip
    with open_accounts(
        prepare(config.load_config(work.folder / "tiny.yaml", given)), work.run(name), None
    ):
        pass


@pytest.mark.parametrize("what", OTHER_USES)
def test_a_row_of_an_account_is_used_without_protection_in_no_run(
    work: Workplace, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rest = toy_rows() - 12 - 1
    overrides = tuple(text.replace("REST", str(rest)) for text in OTHER_USES[what])
    accept(work, "one")
    accept(work, "again")  # the same split is no other use
    words = "rows in the account of s0 would be used without protection"
    untouched(work, "two", *ALONE, *overrides, words=words)
    assert not work.run("two").exists()
    with pytest.raises(LedgerError, match=words):
        accept(work, "two", *overrides)
    # The control: as it was when the registry knew of labelled rows alone.
    shutil.rmtree(work.ledger)
    monkeypatch.setattr(accounts, "find_unprotected_rows", lambda _: iter(()))
    accept(work, "one")
    accept(work, "two", *overrides)


def toy_rows() -> int:
    return len(load_dataset(DataSettings(name="toy", labelled=24)).x_train)


@pytest.mark.parametrize("kind", ["unlabelled", "validation"])
def test_a_labelled_row_that_is_unprotected_in_the_same_run_is_refused_if_it_is_private(
    tmp_path: Path, kind: str
) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (60, 16, 16), dtype=np.uint8), np.arange(60) % 4
    text = TINY.replace("name: toy", f"name: npz, root: {tmp_path / 'rows.npz'}, validation: 5")
    text = text.replace("unlabelled: 30", "unlabelled: 5").replace("labelled: 24", "labelled: 40")
    (tmp_path / "npz.yaml").write_text(text)

    def asked(*overrides: str) -> Any:
        rows: dict[str, Any] = {"x_test": x[50:], "y_test": y[50:]}
        np.savez(tmp_path / "rows.npz", x_train=x[:50], y_train=y[:50], **rows)
        return command(tmp_path / "npz.yaml", "--dry-run", *overrides)

    assert asked().status == 0  # the control: no row is doubled
    split = prepare(config.load_config(tmp_path / "npz.yaml")).federated_data.manifest
    unprotected = split.agents["q0"].unlabelled if kind == "unlabelled" else split.validation
    for copy, row in zip(unprotected, split.agents["s1"].labelled[:2], strict=False):
        x[copy] = x[row]
    words = "2 labelled rows of s1 are unlabelled or validation rows as well"
    assert_refused(asked(), words, "without protection. Remove doubled rows")
    plain = text[: text.index("privacy:")]
    (tmp_path / "npz.yaml").write_text(plain)
    assert asked().status == 0  # the control: who promises nothing may use any row twice


def test_rows_that_two_agents_share_are_refused_in_a_private_run(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (60, 16, 16), dtype=np.uint8)
    y = np.arange(60) % 4
    rows: dict[str, Any] = {"x_test": x[50:], "y_test": y[50:]}
    text = TINY.replace("name: toy", f"name: npz, root: {tmp_path / 'rows.npz'}")
    text = text.replace("unlabelled: 30", "unlabelled: 10").replace("labelled: 24", "labelled: 40")
    (tmp_path / "npz.yaml").write_text(text)
    np.savez(tmp_path / "rows.npz", x_train=x[:50], y_train=y[:50], **rows)
    assert command(tmp_path / "npz.yaml", "--dry-run").status == 0  # the control
    x[:50] = x[:1]  # one image fifty times: whatever the split, two agents have it
    np.savez(tmp_path / "rows.npz", x_train=x[:50], y_train=y[:50], **rows)
    outcome = command(tmp_path / "npz.yaml", "--dry-run")
    assert_refused(outcome, "labelled rows of s0 are rows of s1 as well", "Remove doubled rows")


# The audit --------------------------------------------------------------------------------------


def test_the_run_folder_holds_a_copy_of_the_journals(after_one: Workplace) -> None:
    for agent in ("s0", "s1"):
        own = after_one.run("one") / "ledger" / f"{agent}.jsonl"
        assert own.read_bytes() == (after_one.ledger / f"{agent}.jsonl").read_bytes()
        assert own.stat().st_mode & 0o077 == 0


def test_a_run_stays_consistent_when_another_spends_more_and_the_audit_notes_it(
    after_one: Workplace, audited: Audit
) -> None:
    status, shown = audited(after_one.run("one"))
    assert (status, "gone on" in shown) == (0, False)
    after_one.trained("two")
    status, shown = audited(after_one.run("one"))
    assert status == 0, shown
    assert f"other runs used the account since, and it has spent epsilon {cost(4):.4f} of 8" in (
        shown
    )
    assert audited(after_one.run("two"))[0] == 0


def test_an_audit_without_the_accounts_says_that_it_checks_the_copy(
    after_one: Workplace, audited: Audit
) -> None:
    shutil.rmtree(after_one.ledger)
    status, shown = audited(after_one.run("one"))
    assert status == 0
    assert "are not here; checked is the copy made then" in shown


def test_an_account_whose_journal_is_gone_pays_for_nothing_though_it_looks_new(
    after_one: Workplace,
) -> None:
    journal = after_one.ledger / "s0.jsonl"
    kept = journal.read_bytes()
    journal.unlink()
    outcome = after_one.train("two")
    assert outcome.status == 2
    assert "missing, though rows have been put under it" in outcome.err
    assert not journal.exists() and not after_one.run("two").exists()
    journal.write_bytes(kept)
    after_one.trained("two")


def test_an_account_that_was_copied_without_the_registry_of_its_rows_pays_for_nothing(
    after_one: Workplace,
) -> None:
    """The registry knows which rows were used without protection: without it they get a budget."""
    registry = after_one.ledger / "registry"
    registry.rename(after_one.ledger / "left behind")
    outcome = after_one.train("two")
    assert outcome.status == 2
    assert "s0.rows: missing" in outcome.err and "copy the whole folder" in outcome.err
    assert not registry.exists() and not after_one.run("two").exists()
    (after_one.ledger / "left behind").rename(registry)
    after_one.trained("two")  # the control


def test_an_account_that_forgot_a_run_is_violated(after_one: Workplace, audited: Audit) -> None:
    early = tree_of(after_one.ledger)
    after_one.trained("two")
    for name, content in early.items():  # rolled back behind the second run
        (after_one.ledger / name).write_bytes(content)
    status, shown = audited(after_one.run("two"))
    assert status == 1
    assert "is not the continuation of the copy in this folder" in shown


def tree_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.jsonl")}


def test_a_card_that_says_too_little_of_this_run_is_violated(
    after_one: Workplace, audited: Audit
) -> None:
    card = after_one.card("one")
    card["this_run"]["s1"] *= 0.9
    (after_one.run("one") / "privacy.json").write_text(json.dumps(card))
    status, shown = audited(after_one.run("one"))
    assert status == 1
    assert "s1: the card says that this run alone spent" in shown


def test_a_card_that_claims_what_was_charged_is_violated_until_it_is_written_anew(
    after_one: Workplace, audited: Audit
) -> None:
    # As former versions claimed of accounts that outlive a run.
    card = after_one.card("one")
    card["guarantee"]["epsilon"] = card["epsilon"]["overall"]
    (after_one.run("one") / "privacy.json").write_text(json.dumps(card))
    status, shown = audited(after_one.run("one"))
    assert status == 1
    assert "so its accounts guarantee their budget, 8.000000" in shown
    for name in ("privacy.json", "results.json"):  # or --resume finds that the run is finished
        (after_one.run("one") / name).unlink()
    assert after_one.train("one", resume=after_one.run("one")).status == 0
    assert audited(after_one.run("one"))[0] == 0


def test_a_stopped_run_whose_account_it_charged_again_is_inconclusive(
    work: Workplace, audited: Audit, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Interrupted with a card, resumed, killed: the copy in the folder knows nothing of the last.
    real = round_loop.RoundLoop._one_round

    def stops(self: Any, now: Any, *, last: bool) -> None:
        if now.number == 2:
            raise KeyboardInterrupt
        real(self, now, last=last)

    monkeypatch.setattr(round_loop.RoundLoop, "_one_round", stops)
    assert work.train("one", "algorithm.rounds=3").status == 130
    assert "verdict: INCONCLUSIVE" in audited(work.run("one"))[1]

    def dies(self: Any, now: Any, *, last: bool) -> None:
        real(self, now, last=last)
        raise MemoryError("killed")

    monkeypatch.setattr(round_loop.RoundLoop, "_one_round", dies)
    with pytest.raises(MemoryError):
        work.train("one", "algorithm.rounds=3", resume=work.run("one"))
    status, shown = audited(work.run("one"))
    assert status == 3, shown
    assert "visits were charged after the card was written" in shown
    assert "Resume the run" in shown
    monkeypatch.setattr(round_loop.RoundLoop, "_one_round", real)
    assert work.train("one", "algorithm.rounds=3", resume=work.run("one")).status == 0
    assert audited(work.run("one"))[0] == 0
