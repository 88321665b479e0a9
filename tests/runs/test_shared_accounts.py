"""Shared accounts (``privacy.ledger``): several runs charge one budget per row.

The runs are tiny. Each property has a control in which the same steps succeed.
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


class AccountFolder:
    """A folder with a config, shared accounts, and runs that charge them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.ledger = folder, folder / "accounts"
        (folder / "tiny.yaml").write_text(TINY)

    def run(self, name: str) -> Path:
        return self.folder / name

    def train(self, name: str, *overrides: str, total: float = 8.0, **flags: Any) -> Any:
        """Run ``python -m privssl.train``; later runs use the first run's split."""
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

    def train_to_end(self, name: str, *overrides: str, **given: Any) -> dict[str, Any]:
        """Train a run to its end; return its card."""
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
def shared(tmp_path: Path) -> AccountFolder:
    return AccountFolder(tmp_path)


@pytest.fixture(scope="module")
def _folder_of_run_one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = AccountFolder(tmp_path_factory.mktemp("once"))
    place.train_to_end("one")
    return place.folder


@pytest.fixture
def after_run_one(_folder_of_run_one: Path, monkeypatch: pytest.MonkeyPatch) -> AccountFolder:
    """A folder after one run with two visits to each agent, restored for each test."""
    place = AccountFolder(_folder_of_run_one)
    kept = _folder_of_run_one.with_name(f"{_folder_of_run_one.name}-kept")
    if not kept.exists():
        shutil.copytree(_folder_of_run_one, kept)
    shutil.rmtree(_folder_of_run_one)
    shutil.copytree(kept, _folder_of_run_one)
    return place


Audit = Callable[..., tuple[int, str]]


@pytest.fixture
def run_audit(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Audit:
    from accounting import verify

    monkeypatch.setattr(verify, "available", lambda: False)  # it takes a second

    def run_audit_of(run: Path) -> tuple[int, str]:
        capsys.readouterr()
        status = audit.main([str(run)])
        return status, " ".join(capsys.readouterr().out.split())

    return run_audit_of


# One budget for all runs ------------------------------------------------------------------------


def test_a_second_run_is_charged_to_the_same_account_and_its_card_counts_both(
    after_run_one: AccountFolder,
) -> None:
    first = after_run_one.card("one")
    assert first["this_run"] == pytest.approx({"s0": cost(2), "s1": cost(2)})
    card = after_run_one.train_to_end("two", "run.seed=7")
    assert card["epsilon"]["overall"] == pytest.approx(cost(4))
    assert (
        card["guarantee"]["epsilon"] == 8.0
    )  # the second run was planned after the first was seen
    assert [entry["visits"] for entry in card["agents"]] == [4, 4]
    assert card["this_run"] == pytest.approx({"s0": cost(2), "s1": cost(2)})
    page = (after_run_one.run("two") / "privacy.md").read_text()
    assert "The accounts outlive this run" in page
    assert f"charged epsilon {round_up(cost(4))}" in page and "(8.0000, 1e-05)-DP" in page
    assert not list(
        after_run_one.run("two").glob("ledger/registry")
    )  # the registry stays with the accounts


@pytest.mark.parametrize("here", [True, False], ids=["the account is here", "it is elsewhere"])
def test_the_audit_finds_a_ledger_copy_that_is_older_than_the_runs_checkpoints(
    here: bool, after_run_one: AccountFolder, run_audit: Audit
) -> None:
    after_run_one.train_to_end("two", "run.seed=7")
    if not here:
        after_run_one.ledger.rename(after_run_one.folder / "elsewhere")
    assert run_audit(after_run_one.run("two"))[0] == 0
    for copy in after_run_one.run("two").glob(
        "ledger/*.jsonl"
    ):  # the copy of the first run, which spent less
        shutil.copy(after_run_one.run("one") / "ledger" / copy.name, copy)
    status, printed = run_audit(after_run_one.run("two"))
    assert status == 1 and "was cut or replaced: checkpoint" in printed


def test_control_without_a_shared_account_each_run_counts_only_its_own_charges(
    after_run_one: AccountFolder,
) -> None:
    # The control: the same second run with its own accounts does not count the first.
    card = after_run_one.train_to_end(
        "two", "run.seed=7", "privacy.ledger=", "privacy.ledger_epsilon="
    )
    assert card["guarantee"]["epsilon"] == pytest.approx(cost(2))
    assert card["this_run"] is None


def test_the_accounts_budget_limits_a_later_run(shared: AccountFolder) -> None:
    total = (cost(5) + cost(6)) / 2  # pays for five visits
    small = f"privacy.epsilon={(cost(3) + cost(4)) / 2}"
    for name in ("one", "two"):
        shared.train_to_end(name, small, total=total)
        assert shared.status(name) == "finished"
    card = shared.train_to_end("three", small, total=total)
    assert shared.status("three") == "budget_exhausted"
    assert shared.visits() == 5
    assert card["epsilon"]["overall"] == pytest.approx(cost(5))
    assert card["guarantee"]["epsilon"] == pytest.approx(total)
    assert card["this_run"]["s0"] == pytest.approx(cost(1))


def test_a_runs_own_budget_limits_it_although_the_account_has_more(shared: AccountFolder) -> None:
    limit = (cost(2) + cost(3)) / 2
    shared.train_to_end("one", "algorithm.rounds=4", f"privacy.epsilon={limit}", total=50.0)
    assert shared.status("one") == "budget_exhausted"
    assert shared.visits() == 2
    shared.train_to_end("two", "algorithm.rounds=4", f"privacy.epsilon={cost(4)}", total=50.0)
    assert shared.visits() == 2 + 4  # the control: the limit was of the run, not of the account


@pytest.mark.slow
def test_a_runs_own_budget_limits_it_across_a_kill_and_a_resume(
    shared: AccountFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = (cost(3) + cost(4)) / 2
    overrides = ("algorithm.rounds=6", f"privacy.epsilon={limit}")
    real = checkpoint.save_snapshot

    def fail_in_round(folder: Path, snapshot: Any) -> None:
        if snapshot.round == 2:  # two visits of each agent are charged, one is in a checkpoint
            raise MemoryError("killed")
        real(folder, snapshot)

    monkeypatch.setattr(checkpoint, "save_snapshot", fail_in_round)
    with pytest.raises(MemoryError):
        shared.train("one", *overrides, total=50.0)
    monkeypatch.setattr(checkpoint, "save_snapshot", real)
    assert shared.visits() == 2
    outcome = shared.train("one", *overrides, total=50.0, resume=shared.run("one"))
    assert outcome.status == 0, outcome
    assert shared.visits() == 3  # three in all, not three more
    assert shared.card("one")["this_run"]["s0"] == pytest.approx(cost(3))
    journal = read_journal(shared.ledger / "s0.jsonl")
    assert len(set(journal.runs)) == 1


# Refused runs, without charges -------------------------------------------------------------------


def assert_refused_without_changes(
    shared: AccountFolder, name: str, *overrides: str, error_text: str, **given: Any
) -> None:
    """Assert that a run is refused with this error, and no account and run folder changes."""
    before = tree(shared.folder)
    assert_refused(shared.train(name, *overrides, **given), error_text)
    assert tree(shared.folder) == before
    assert not (shared.run(name) / "checkpoints").exists() or name == "one"


#: The same 24 rows, but three agents hold them.
ANOTHER_SPLIT = ("agents.support=3", "data.split=")


def test_a_shared_account_refuses_another_split(after_run_one: AccountFolder) -> None:
    assert_refused_without_changes(
        after_run_one, "two", *ANOTHER_SPLIT, error_text="would be in the accounts of s0 and"
    )
    assert not after_run_one.run("two").exists()


def test_a_refused_run_with_another_split_does_not_replace_the_former_run(
    after_run_one: AccountFolder,
) -> None:
    overrides = (*ANOTHER_SPLIT, "run.overwrite=true")
    assert_refused_without_changes(
        after_run_one, "one", *overrides, error_text="would be in the accounts of s0 and"
    )


@pytest.mark.parametrize(
    ("override", "given", "error_text"),
    [
        ("run.seed=1", {"total": 9.0}, "the budget cannot rise from 8 to 9"),
        ("privacy.delta=0.001", {}, "delta cannot change from 1e-05 to 0.001"),
        ("privacy.delta=1.0e-06", {}, "delta cannot change from 1e-05 to 1e-06"),
        ("privacy.record_counts=private", {}, "adjacency cannot change"),
    ],
)
def test_settings_that_would_weaken_the_accounts_guarantee_are_refused(
    after_run_one: AccountFolder, override: str, given: dict[str, Any], error_text: str
) -> None:
    assert_refused_without_changes(after_run_one, "two", override, error_text=error_text, **given)


def test_a_smaller_account_budget_is_accepted_but_does_not_lower_the_guarantee(
    after_run_one: AccountFolder, run_audit: Audit
) -> None:
    card = after_run_one.train_to_end("two", total=7.0)
    assert card["agents"][0]["budget"]["epsilon"] == 7.0
    # It was lowered after a run was seen, so the guarantee is the account's first budget.
    assert card["guarantee"]["epsilon"] == 8.0
    assert run_audit(after_run_one.run("two"))[0] == 0
    card["guarantee"]["epsilon"] = 7.0
    (after_run_one.run("two") / "privacy.json").write_text(json.dumps(card))
    status, printed = run_audit(after_run_one.run("two"))
    assert status == 1
    assert "the card claims epsilon 7.000000" in printed


def test_a_sound_run_after_the_published_scheme_is_refused(shared: AccountFolder) -> None:
    card = shared.train_to_end("one", *AS_PUBLISHED)
    assert card["guarantee"] is None
    assert_refused_without_changes(
        shared, "two", error_text="scope cannot change from as_published to sound"
    )


def test_the_published_scheme_after_a_sound_run_is_refused(after_run_one: AccountFolder) -> None:
    assert_refused_without_changes(
        after_run_one, "two", *AS_PUBLISHED, error_text="scope cannot change from sound"
    )


def test_a_second_run_at_the_same_time_is_refused(after_run_one: AccountFolder) -> None:
    holder = command_config(after_run_one, "two")
    after_run_one.run("two").mkdir()
    with open_accounts(prepare(holder), after_run_one.run("two"), None):
        spent = [after_run_one.visits(agent) for agent in ("s0", "s1")]
        assert_refused(after_run_one.train("three"), "another process is using this account")
        assert [after_run_one.visits(agent) for agent in ("s0", "s1")] == spent
    assert after_run_one.train_to_end("three", "run.overwrite=true")["agents"][0]["visits"] == 4


def command_config(shared: AccountFolder, name: str) -> config.Config:
    return config.load_config(
        shared.folder / "tiny.yaml",
        [
            f"run.output={shared.run(name)}", f"privacy.ledger={shared.ledger}",
            "privacy.ledger_epsilon=8.0", f"data.split={shared.run('one') / 'split.json'}",
        ],
    )  # fmt: skip


def test_replacing_a_run_refunds_no_charges(after_run_one: AccountFolder) -> None:
    card = after_run_one.train_to_end("one", "run.overwrite=true")
    assert [entry["visits"] for entry in card["agents"]] == [4, 4]
    assert card["this_run"]["s0"] == pytest.approx(cost(2))


def test_the_audit_finds_a_card_without_the_ledger_of_a_replaced_run(
    shared: AccountFolder, run_audit: Audit
) -> None:
    shared.train_to_end("one", "privacy.ledger=", "privacy.ledger_epsilon=")
    card = shared.train_to_end("one", "run.overwrite=true")  # from here on the accounts are shared
    assert [entry["ledger"] for entry in card["former_ledgers"]] == ["one.ledger-001"] * 2
    shared.train_to_end("one", "run.overwrite=true")
    assert run_audit(shared.run("one"))[0] == 0  # the control: the card lists the former ledger
    card = shared.card("one") | {"former_ledgers": []}
    for number in (1, 2):
        shutil.rmtree(shared.folder / f"one.ledger-00{number}")
    (shared.run("one") / "privacy.json").write_text(json.dumps(card))
    (shared.run("one") / "privacy.md").write_text(render_markdown(card))
    (shared.run("one") / "model_card.md").unlink()
    status, printed = run_audit(shared.run("one"))
    assert status == 1
    assert "record one.ledger-001, the ledger of a replaced run" in printed


@pytest.mark.parametrize("place", ["", "ledger", "deep/er"])
def test_a_shared_account_inside_a_run_folder_is_refused(
    after_run_one: AccountFolder, place: str
) -> None:
    # They would be deleted with the run, and their charges would be lost.
    for name in ("one", "two"):
        inside = after_run_one.run(name) / place
        mine = "run.overwrite=true" if name == "one" else "run.seed=3"
        assert_refused_without_changes(
            after_run_one, name, f"privacy.ledger={inside}", mine, error_text="the folder of a run"
        )
        assert not (after_run_one.run(name) / "registry").exists()
    other = after_run_one.run("one") / place  # inside the folder of another run
    assert_refused_without_changes(
        after_run_one, "three", f"privacy.ledger={other}", error_text="the folder of a run"
    )


@pytest.mark.parametrize(
    ("line", "error_text"),
    [
        ("ledger: accounts", "privacy.ledger_epsilon"),
        ("ledger_epsilon: 8.0", "privacy.ledger "),
        ("ledger: accounts, ledger_epsilon: 3.0", "at least epsilon (4)"),
        ("ledger: accounts, ledger_epsilon: .inf", "at least epsilon (4)"),
    ],
)
def test_privacy_ledger_and_its_budget_are_required_together(
    tmp_path: Path, line: str, error_text: str
) -> None:
    text = TINY.replace("privacy: {", f"privacy: {{{line}, ")
    (tmp_path / "tiny.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        config.load_config(tmp_path / "tiny.yaml")
    assert error_text in f"{caught.value} "
    number = 1 + text.splitlines().index(next(s for s in text.splitlines() if "privacy" in s))
    assert f"line {number}" in str(caught.value)


# Rows without protection -------------------------------------------------------------------------

#: One agent holds all labelled rows and every other row is used without noise, whatever the split.
#: So a row that leaves the labelled ones is an unlabelled one, and never another agent's.
ONE_SUPPORT_AGENT = ("agents.support=1", "data.unlabelled=null", "data.split=")
OTHER_USES = {
    "rows of the account become unlabelled": ("data.labelled=12",),
    "unlabelled rows get an account": ("data.labelled=36",),
    # At most one row of the account is unlabelled and twelve are labelled: eleven are neither.
    "rows of the account become validation rows": (
        "data.labelled=12", "data.validation=REST", "data.unlabelled=1",
    ),
    "without visits, so that only unlabelled rows are used": (
        "data.labelled=12", "privacy.epsilon=0.0",
    ),
}  # fmt: skip


def open_and_close_accounts(shared: AccountFolder, name: str, *overrides: str) -> None:
    """Register a run's rows with the accounts, as a run does before its first visit."""
    chosen = [text for text in (*ONE_SUPPORT_AGENT, *overrides) if text != "data.split="]
    last = {text.partition("=")[0]: text for text in chosen}  # an override may be given once
    given = [
        f"run.output={shared.run(name)}", f"privacy.ledger={shared.ledger}",
        "privacy.ledger_epsilon=8.0", *last.values(),
    ]  # fmt: skip
    with open_accounts(
        prepare(config.load_config(shared.folder / "tiny.yaml", given)), shared.run(name), None
    ):
        pass


@pytest.mark.parametrize("what", OTHER_USES)
def test_no_run_may_use_a_row_of_an_account_without_protection(
    shared: AccountFolder, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rest = toy_rows() - 12 - 1
    overrides = tuple(text.replace("REST", str(rest)) for text in OTHER_USES[what])
    open_and_close_accounts(shared, "one")
    open_and_close_accounts(shared, "again")  # the same split again is allowed
    error_text = "rows in the account of s0 would be used without protection"
    assert_refused_without_changes(
        shared, "two", *ONE_SUPPORT_AGENT, *overrides, error_text=error_text
    )
    assert not shared.run("two").exists()
    with pytest.raises(LedgerError, match=error_text):
        open_and_close_accounts(shared, "two", *overrides)
    # The control: without the check of unprotected rows.
    shutil.rmtree(shared.ledger)
    monkeypatch.setattr(accounts, "find_unprotected_rows", lambda _: iter(()))
    open_and_close_accounts(shared, "one")
    open_and_close_accounts(shared, "two", *overrides)


def toy_rows() -> int:
    return len(load_dataset(DataSettings(name="toy", labelled=24)).x_train)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("kind", ["unlabelled", "validation"])
def test_a_private_run_refuses_a_labelled_row_that_it_also_uses_without_protection(
    tmp_path: Path, kind: str
) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (60, 16, 16), dtype=np.uint8), np.arange(60) % 4
    text = TINY.replace("name: toy", f"name: npz, root: {tmp_path / 'rows.npz'}, validation: 5")
    text = text.replace("unlabelled: 30", "unlabelled: 5").replace("labelled: 24", "labelled: 40")
    (tmp_path / "npz.yaml").write_text(text)

    def dry_run(*overrides: str) -> Any:
        rows: dict[str, Any] = {"x_test": x[50:], "y_test": y[50:]}
        np.savez(tmp_path / "rows.npz", x_train=x[:50], y_train=y[:50], **rows)
        return command(tmp_path / "npz.yaml", "--dry-run", *overrides)

    assert dry_run().status == 0  # the control: no duplicate rows
    split = prepare(config.load_config(tmp_path / "npz.yaml")).federated_data.manifest
    unprotected = split.agents["q0"].unlabelled if kind == "unlabelled" else split.validation
    for copy, row in zip(unprotected, split.agents["s1"].labelled[:2], strict=False):
        x[copy] = x[row]
    error_text = "2 labelled rows of s1 are unlabelled or validation rows as well"
    assert_refused(dry_run(), error_text, "without protection. Remove doubled rows")
    plain = text[: text.index("privacy:")]
    (tmp_path / "npz.yaml").write_text(plain)
    assert dry_run().status == 0  # the control: a run without privacy may use rows twice


def test_a_private_run_refuses_rows_that_two_agents_share(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (60, 16, 16), dtype=np.uint8)
    y = np.arange(60) % 4
    rows: dict[str, Any] = {"x_test": x[50:], "y_test": y[50:]}
    text = TINY.replace("name: toy", f"name: npz, root: {tmp_path / 'rows.npz'}")
    text = text.replace("unlabelled: 30", "unlabelled: 10").replace("labelled: 24", "labelled: 40")
    (tmp_path / "npz.yaml").write_text(text)
    np.savez(tmp_path / "rows.npz", x_train=x[:50], y_train=y[:50], **rows)
    assert command(tmp_path / "npz.yaml", "--dry-run").status == 0  # the control
    x[:50] = x[:1]  # one image fifty times: in any split two agents have it
    np.savez(tmp_path / "rows.npz", x_train=x[:50], y_train=y[:50], **rows)
    outcome = command(tmp_path / "npz.yaml", "--dry-run")
    assert_refused(outcome, "labelled rows of s0 are rows of s1 as well", "Remove doubled rows")


def test_a_resume_without_its_accounts_begins_no_new_registry(
    after_run_one: AccountFolder,
) -> None:
    # In a new one, journals that are put back would forget which rows other runs used unprotected.
    for name in ("privacy.json", "results.json"):  # or --resume finds that the run is finished
        (after_run_one.run("one") / name).unlink()
    elsewhere = after_run_one.ledger.with_name("elsewhere")
    after_run_one.ledger.rename(elsewhere)
    outcome = after_run_one.train("one", resume=after_run_one.run("one"))
    assert_refused(outcome, "s0.jsonl: missing", "Put it back")
    assert not after_run_one.ledger.exists()
    elsewhere.rename(after_run_one.ledger)  # the control
    assert after_run_one.train("one", resume=after_run_one.run("one")).status == 0


# The audit --------------------------------------------------------------------------------------


def test_the_run_folder_has_a_private_copy_of_the_journals(after_run_one: AccountFolder) -> None:
    for agent in ("s0", "s1"):
        own = after_run_one.run("one") / "ledger" / f"{agent}.jsonl"
        assert own.read_bytes() == (after_run_one.ledger / f"{agent}.jsonl").read_bytes()
        assert own.stat().st_mode & 0o077 == 0


def test_the_audit_of_a_run_stays_consistent_and_notes_later_charges_of_other_runs(
    after_run_one: AccountFolder, run_audit: Audit
) -> None:
    status, printed = run_audit(after_run_one.run("one"))
    assert (status, "gone on" in printed) == (0, False)
    after_run_one.train_to_end("two")
    status, printed = run_audit(after_run_one.run("one"))
    assert status == 0, printed
    assert f"other runs used the account since, and it has spent epsilon {cost(4):.4f} of 8" in (
        printed
    )
    assert run_audit(after_run_one.run("two"))[0] == 0


def test_an_audit_without_the_accounts_reports_that_it_checks_the_copy(
    after_run_one: AccountFolder, run_audit: Audit
) -> None:
    shutil.rmtree(after_run_one.ledger)
    status, printed = run_audit(after_run_one.run("one"))
    assert status == 0
    assert "are not here; checked is the copy made then" in printed


def test_an_account_with_a_missing_journal_is_refused_and_not_started_anew(
    after_run_one: AccountFolder,
) -> None:
    journal = after_run_one.ledger / "s0.jsonl"
    kept = journal.read_bytes()
    journal.unlink()
    outcome = after_run_one.train("two")
    assert outcome.status == 2
    assert "missing, though rows have been put under it" in outcome.err
    assert not journal.exists() and not after_run_one.run("two").exists()
    journal.write_bytes(kept)
    after_run_one.train_to_end("two")


def test_an_account_without_its_row_registry_is_refused(
    after_run_one: AccountFolder,
) -> None:
    """The registry lists rows used without protection; without it they would get a budget."""
    registry = after_run_one.ledger / "registry"
    registry.rename(after_run_one.ledger / "left behind")
    outcome = after_run_one.train("two")
    assert outcome.status == 2
    assert "s0.rows: missing" in outcome.err and "copy the whole folder" in outcome.err
    assert not registry.exists() and not after_run_one.run("two").exists()
    (after_run_one.ledger / "left behind").rename(registry)
    after_run_one.train_to_end("two")  # the control


def test_the_audit_finds_an_account_that_lacks_a_runs_charges(
    after_run_one: AccountFolder, run_audit: Audit
) -> None:
    older_journals = journals_of(after_run_one.ledger)
    after_run_one.train_to_end("two")
    for name, content in older_journals.items():  # rolled back to before the second run
        (after_run_one.ledger / name).write_bytes(content)
    status, printed = run_audit(after_run_one.run("two"))
    assert status == 1
    assert "is not the continuation of the copy in this folder" in printed


def journals_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.jsonl")}


def test_the_audit_finds_a_card_that_understates_this_runs_charges(
    after_run_one: AccountFolder, run_audit: Audit
) -> None:
    card = after_run_one.card("one")
    card["this_run"]["s1"] *= 0.9
    (after_run_one.run("one") / "privacy.json").write_text(json.dumps(card))
    status, printed = run_audit(after_run_one.run("one"))
    assert status == 1
    assert "s1: the card says that this run alone spent" in printed


def test_the_audit_finds_a_card_that_claims_the_charges_instead_of_the_budget(
    after_run_one: AccountFolder, run_audit: Audit
) -> None:
    # As former versions claimed for shared accounts.
    card = after_run_one.card("one")
    card["guarantee"]["epsilon"] = card["epsilon"]["overall"]
    (after_run_one.run("one") / "privacy.json").write_text(json.dumps(card))
    status, printed = run_audit(after_run_one.run("one"))
    assert status == 1
    assert "so its accounts guarantee their budget, 8.000000" in printed
    for name in ("privacy.json", "results.json"):  # or --resume finds that the run is finished
        (after_run_one.run("one") / name).unlink()
    assert after_run_one.train("one", resume=after_run_one.run("one")).status == 0
    assert run_audit(after_run_one.run("one"))[0] == 0


def test_the_audit_of_a_run_with_charges_after_its_card_is_inconclusive(
    shared: AccountFolder, run_audit: Audit, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Interrupted with a card, resumed, killed: the copy in the folder lacks the last charges.
    real = round_loop.RoundLoop._run_round

    def interrupt_in_round_2(self: Any, now: Any, *, last: bool) -> None:
        if now.number == 2:
            raise KeyboardInterrupt
        real(self, now, last=last)

    monkeypatch.setattr(round_loop.RoundLoop, "_run_round", interrupt_in_round_2)
    assert shared.train("one", "algorithm.rounds=3").status == 130
    assert "verdict: INCONCLUSIVE" in run_audit(shared.run("one"))[1]

    def fail_in_round(self: Any, now: Any, *, last: bool) -> None:
        real(self, now, last=last)
        raise MemoryError("killed")

    monkeypatch.setattr(round_loop.RoundLoop, "_run_round", fail_in_round)
    with pytest.raises(MemoryError):
        shared.train("one", "algorithm.rounds=3", resume=shared.run("one"))
    status, printed = run_audit(shared.run("one"))
    assert status == 3, printed
    assert "visits were charged after the card was written" in printed
    assert "Resume the run" in printed
    monkeypatch.setattr(round_loop.RoundLoop, "_run_round", real)
    assert shared.train("one", "algorithm.rounds=3", resume=shared.run("one")).status == 0
    assert run_audit(shared.run("one"))[0] == 0
