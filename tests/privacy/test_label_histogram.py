"""The plan of a label census: what gets noise, what it costs, and what a run reports.

Sensitivity and epsilon are computed from the noise distribution. Runs use a small
configs/label_census.yaml. Each false card has a matching sentence, and the true card passes the
same audit.
"""

import contextlib
import io
import json
import shutil
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from accounting import verify
from accounting.accountants import cost_of
from accounting.budget import Budget, Guarantee
from accounting.discrete_laplace import log_pmf
from accounting.errors import BudgetExhausted, PlanError
from accounting.events import Event, PoissonSampledGaussianEvent, PureDpEvent
from accounting.ledger import Account, AccountPlan, read_journal
from privssl.algorithms import ALGORITHMS
from privssl.algorithms.label_census.feature_map import FeatureMapRounds, Map
from privssl.audit import __main__ as audit
from privssl.compare import table
from privssl.core.agents import Agent, LabelledRows
from privssl.core.engine import Call
from privssl.core.federation import Federation
from privssl.core.messages import Ack, Message
from privssl.core.task import Context
from privssl.engines.local import LocalEngine
from privssl.errors import PrivacyError
from privssl.experiment import config as configs
from privssl.experiment.prepare import prepare
from privssl.privacy import label_histogram
from privssl.privacy.card_text import guarantee_sentence
from privssl.privacy.label_histogram import CensusPlan, count_rows, make_census_plan
from privssl.privacy.plan import Plan
from privssl.runs import accounts, checkpoint, round_loop, run_dir
from privssl.runs.checkpoint import Snapshot
from privssl.runs.round_plan import planned_rounds
from privssl.settings.schema import DP_SGD_KEYS, PrivacySettings
from tests.support.command_line import Outcome, assert_refused, command
from tests.support.ledger import visits_left

CONFIG = Path(__file__).parents[2] / "configs" / "label_census.yaml"
PLAN = CensusPlan(2.0, visits=1)
TABLE = torch.arange(12).view(4, 3)
GAUSSIAN = PoissonSampledGaussianEvent(noise_multiplier=8.0, sample_rate=1.0, steps=5)


def decline_reason(settings: dict[str, Any]) -> CensusPlan:
    return make_census_plan(PrivacySettings(**settings), rows=100.0)


# What is released -----------------------------------------------------------------------------


def test_every_count_gets_its_own_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[float, int]] = []

    def numbered(epsilon: float, count: int) -> NDArray[np.int64]:
        asked.append((epsilon, count))
        return np.arange(count) - 5

    monkeypatch.setattr(label_histogram, "discrete_laplace", numbered)
    released = PLAN.release(TABLE)
    assert released.tolist() == (2 * TABLE - 5).tolist()  # TABLE has the numbers of the draws
    assert asked == [(2.0, 12)]
    assert (released.dtype, released.device.type) == (torch.int64, "cpu")


def test_negative_counts_are_released_as_they_are() -> None:
    # A cell of 0 becomes negative with probability e^-0.5 / (1 + e^-0.5) = 0.378; none of 400:
    # 1e-82.
    assert int(CensusPlan(0.5, visits=1).release(torch.zeros(40, 10, dtype=torch.int64)).min()) < 0


def test_the_counted_table_is_not_modified() -> None:
    before = TABLE.clone()
    PLAN.release(TABLE)
    assert torch.equal(TABLE, before)


@pytest.mark.parametrize(
    ("counts", "why"),
    [
        (TABLE.float(), "whole numbers .*float32"),
        (TABLE > 3, "whole numbers .*bool"),
        (TABLE - 1, "negative count"),
        (TABLE.view(-1), r"shape \(12,\)"),
    ],
)
def test_invalid_tables_of_counts_are_refused(counts: Tensor, why: str) -> None:
    with pytest.raises(PrivacyError, match=why):
        PLAN.release(counts)


def test_a_plan_with_epsilon_zero_is_refused() -> None:
    with pytest.raises(PlanError, match="epsilon of discrete Laplace noise is 0"):
        CensusPlan(0.0, visits=0).release(TABLE)


# What it costs --------------------------------------------------------------------------------


def largest_ratio(one: Tensor, other: Tensor, epsilon: float) -> float:
    """The largest log ratio of the probabilities of one output given two tables.

    Over all outputs: cells are independent, and each ratio is largest at one of the two counts.
    """
    ends = torch.stack([one, other]).double().numpy()
    ratios = log_pmf(epsilon, ends - one.numpy()) - log_pmf(epsilon, ends - other.numpy())
    return float(np.abs(ratios).max(axis=0).sum())


def test_adding_a_record_costs_epsilon_replacing_one_twice_and_k_records_k_times() -> None:
    more, exchanged, of_one_person = TABLE.clone(), TABLE.clone(), TABLE.clone()
    more[2, 1] += 1
    exchanged[2, 1] += 1
    exchanged[0, 2] -= 1
    of_one_person[0, 0] += 2
    of_one_person[3, 1] += 1
    assert largest_ratio(more, TABLE, 2.0) == pytest.approx(2.0)
    assert largest_ratio(exchanged, TABLE, 2.0) == pytest.approx(4.0)
    assert largest_ratio(of_one_person, TABLE, 2.0) == pytest.approx(6.0)


def test_a_histogram_plan_has_the_interface_of_every_plan() -> None:
    plan: Plan = decline_reason({"epsilon": 4.0})
    assert plan == CensusPlan(4.0, visits=1, rows=100.0)
    assert (plan.update, plan.protect, plan.scope) == (("census",), ("census",), "sound")
    assert (plan.event, plan.visits) == (PureDpEvent(4.0, 1), 1)
    nothing = decline_reason({"epsilon": 0.0})
    assert (nothing.visits, nothing.epsilon) == (0, 0.0)


def test_epsilon_is_rounded_down_to_the_drawn_epsilon_and_three_tenths_pay_for_three() -> None:
    plan = decline_reason({"epsilon": 0.1})
    assert plan.epsilon == 104857 / 2**20
    assert 0.1 - 2**-20 < plan.epsilon < 0.1
    assert sum([plan.epsilon] * 3) == 3 * 104857 / 2**20 <= 0.3
    assert 0.1 + 0.1 + 0.1 > 0.3  # the control: in floating point three are too many


@pytest.mark.parametrize("epsilon", [1e-7, 1001.0])
def test_an_epsilon_that_is_too_small_or_large_for_noise_is_refused(epsilon: float) -> None:
    with pytest.raises(PlanError, match="it must be from 1e-6 to 1000"):
        decline_reason({"epsilon": epsilon})


def promise(event: Event, epsilon: float = 6.0, delta: float = 1e-3) -> AccountPlan:
    return AccountPlan(
        agent="s0", budget=Budget(epsilon, delta), scope="sound", update=("census",),
        protect=("census",), event=event, n_public=34,
    )  # fmt: skip


def test_the_epsilon_of_pure_releases_is_their_sum_at_delta_zero() -> None:
    plan, spent = promise(PureDpEvent(4.0, 1)), cost_of([PureDpEvent(4.0, 1)] * 2)
    assert (plan.epsilon(spent), plan.delta_of(spent)) == (8.0, 0.0)
    # The control: with delta the epsilon is smaller, and a pure claim may not use it.
    assert spent.epsilon(1e-3) < 8.0
    # Many small releases cost less with delta, and a pure claim still adds them up.
    many = cost_of([PureDpEvent(0.0625, 1)] * 64)
    assert promise(PureDpEvent(0.0625, 1)).epsilon(many) == 4.0 > many.epsilon(1e-5)


def test_a_pure_release_beside_other_releases_is_claimed_with_delta() -> None:
    pure, mixed = cost_of([PureDpEvent(1.0, 1)]), cost_of([PureDpEvent(1.0, 1), GAUSSIAN])
    plan = promise(PureDpEvent(1.0, 1))
    assert plan.delta_of(mixed) == 1e-3
    # What follows the pure release may depend on it: tests/accounting/test_filters.py.
    assert plan.epsilon(mixed) > mixed.epsilon(1e-3)
    assert mixed.epsilon(0.0) == float("inf")  # no epsilon makes a Gaussian pure
    assert promise(GAUSSIAN).delta_of(pure) == 1e-3  # plans of noisy gradients have a delta


def test_an_account_pays_for_censuses_while_their_sum_fits_the_budget(tmp_path: Path) -> None:
    plan = promise(PureDpEvent(2.0, 1))
    account = Account.open(tmp_path / "s0.jsonl", plan, resume=False)
    assert visits_left(account) == 3
    for number in range(3):
        with account.spend(plan.event, f"census {number}"):
            pass
    assert (account.spent(), account.left(), visits_left(account)) == (6.0, 0.0, 0)
    with (
        pytest.raises(BudgetExhausted, match=r"spent epsilon 6.0000 of 6 \(delta 0\).* to 8.0000"),
        account.spend(plan.event, "census 3"),
    ):
        raise AssertionError("the block was entered")
    account.close()
    assert read_journal(tmp_path / "s0.jsonl").epsilon == 6.0


# Texts ----------------------------------------------------------------------------------------


def test_a_pure_claim_is_printed_without_a_delta() -> None:
    def sentence(epsilon: float, delta: float) -> str:
        return str(Guarantee(epsilon, delta, "record", "zero_out", ("census",), "largest agent"))

    assert "(census) is 4-DP (pure epsilon, delta 0 for ideal random bits) with" in sentence(4.0, 0)
    assert " is 0.1-DP (pure" in sentence(104857 / 2**20, 0.0)  # rounded up, as all claims are
    assert " is 10-DP (pure" in sentence(10.0, 0.0)
    assert " is (4.0000, 1e-05)-DP with" in sentence(4.0, 1e-5)  # other claims have a delta


def test_a_dry_run_prints_what_is_released_and_what_it_costs() -> None:
    settings = PrivacySettings(epsilon=4.0)
    assert decline_reason({"epsilon": 4.0}).spending(settings) == (
        "Scope sound. One census of each support agent: its labelled rows by cluster and class, "
        "with discrete Laplace noise on every count: pure epsilon 4 of 4 (delta 0)."
    )
    nothing = PrivacySettings(epsilon=0.0)
    assert "no labelled row is read" in decline_reason({"epsilon": 0.0}).spending(nothing)


# The config -----------------------------------------------------------------------------------

SMALL = (
    "data.name=toy", "data.labelled=40", "data.unlabelled=80", "agents.query=2", "model.width=4",
    "algorithm.filters=8", "algorithm.cluster_rounds=3", "algorithm.vote_rounds=1",
    "algorithm.self_training_rounds=1", "algorithm.local_steps=1", "algorithm.batch_size=8",
    "run.images_every=1000",
)  # fmt: skip


def train(output: Path, *overrides: str) -> Outcome:
    """Run the training command on the smallest census. The last of equal keys counts."""
    chosen = dict(text.split("=", 1) for text in (*SMALL, "privacy.epsilon=4.0", *overrides))
    given = [f"{key}={value}" for key, value in chosen.items()]
    return command(CONFIG, f"run.output={output}", "--quiet", *given)


OTHERS = {
    "update_at_support": "[F, D]", "protect": "[G]", "noise_multiplier": "2.0", "clip_norm": "0.5",
    "sample_rate": "0.2", "steps": "3", "visits": "2", "learning_rate": "0.5", "momentum": "0.9",
    "average_last": "0.0", "augment": "weak", "views": "2", "acknowledge_unsound": "true",
}  # fmt: skip


def test_dp_sgd_settings_are_refused_by_name(tmp_path: Path) -> None:
    assert set(OTHERS) == set(DP_SGD_KEYS)
    refused = train(tmp_path / "run", *(f"privacy.{key}={text}" for key, text in OTHERS.items()))
    assert_refused(refused)
    for key in OTHERS:
        about = [line for line in refused.err.splitlines() if f"privacy.{key} " in line]
        assert any("has no meaning for label_census" in line for line in about), key
    assert not (tmp_path / "run").exists()


def test_the_same_settings_at_their_defaults_are_accepted() -> None:
    done = command(CONFIG, *SMALL, "privacy.epsilon=4.0", "privacy.steps=10", "--dry-run")
    assert done.status == 0, done
    assert "pure epsilon 4 of 4 (delta 0)" in " ".join(done.out.split())


def test_a_norm_through_which_rows_affect_each_other_is_refused(tmp_path: Path) -> None:
    assert_refused(train(tmp_path / "run", "model.norm=batch"), "move others to another cluster")


def test_every_other_private_algorithm_has_noisy_gradients() -> None:
    private = {name for name, kind in ALGORITHMS.items() if kind.can_be_private}
    census = {name for name, kind in ALGORITHMS.items() if kind.mechanism == "census"}
    assert census == {"label_census"} < private


# A run ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with epsilon 4."""
    run = tmp_path_factory.mktemp("census") / "run"
    outcome = train(run)
    assert outcome.status == 0, outcome
    return run


def card_of(run: Path) -> dict[str, Any]:
    card: dict[str, Any] = json.loads((run / "privacy.json").read_text())
    return card


def audited(run: Path, *flags: str) -> tuple[int, str]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = audit.main([str(run), *flags])
    return status, printed.getvalue()


def test_a_run_charges_each_support_agent_one_event(trained: Path) -> None:
    for agent in ("s0", "s1"):
        journal = read_journal(trained / "ledger" / f"{agent}.jsonl")
        assert journal.events == [PureDpEvent(4.0, 1)]
        assert (journal.plan.update, journal.plan.protect) == (("census",), ("census",))


def test_the_card_names_the_released_counts_and_a_pure_claim(trained: Path) -> None:
    card = card_of(trained)
    assert (card["guarantee"]["epsilon"], card["guarantee"]["delta"]) == (4.0, 0.0)
    assert (
        "is 4-DP (pure epsilon, delta 0 for ideal random bits) with respect to" in card["sentence"]
    )
    assert card["guarantee"]["covers"] == ["census"]
    listed = {entry["name"]: (entry["status"], entry["why"]) for entry in card["releases"]}
    assert listed["census"] == (
        "covered", "integer histogram with discrete Laplace noise on every cell",
    )  # fmt: skip
    assert not {"F", "D", "G"} & set(listed)
    assert "networks trained on labelled rows: there are none" in card["not_sent"]
    assert card["headline"] is None  # at delta 0, no tighter bound exists
    assert card["epsilon"]["person_across_agents"] == 8.0
    # e^4 / (1 + e^4): the bound of randomized response, which this mechanism reaches.
    assert card["attack_bounds"]["balanced_accuracy"] == pytest.approx(0.98201379)
    assert not any("floating point" in text for text in card["not_protected"])
    assert any("delta 0 is for ideal ones" in text for text in card["not_protected"])
    results = json.loads((trained / "results.json").read_text())
    assert results["privacy"]["guarantee"] == card["guarantee"]
    page = (trained / "privacy.md").read_text()
    assert (
        "No network is trained on labelled rows. Released about them, with noise: census." in page
    )
    assert "delta: 0 (pure epsilon; 1e-05 in the accounts)" in page


def test_a_comparison_prints_the_claim_with_delta_zero(trained: Path) -> None:
    results = json.loads((trained / "results.json").read_text())
    told_of = table.epsilon_of([results], 1e-5)
    assert str(told_of) == "guarantee 4.0000 (delta 0) for census"


def test_the_audit_repeats_the_claim_of_the_card(trained: Path) -> None:
    status, text = audited(trained)
    assert status == 0, text
    assert card_of(trained)["sentence"] in " ".join(text.split())
    report = json.loads(audited(trained, "--json")[1])
    assert report["verdict"] == "consistent"
    assert {(a["claimed"], a["recomputed"], a["method"]) for a in report["agents"]} == {
        (4.0, 4.0, "sum")
    }


def less_epsilon(card: dict[str, Any]) -> None:
    card["guarantee"]["epsilon"] = card["epsilon"]["overall"] = 3.0
    for entry in card["agents"]:
        entry["epsilon"]["value"] = 3.0


def with_delta(card: dict[str, Any]) -> None:
    card["guarantee"]["delta"] = card["delta"]


def another_delta(card: dict[str, Any]) -> None:
    card["guarantee"]["delta"] = 1e-9


def a_network_is_covered(card: dict[str, Any]) -> None:
    card["releases"].append({"name": "F", "status": "covered", "why": "trained by DP-SGD"})


def no_noise_on_some(card: dict[str, Any]) -> None:
    card["releases"][0]["why"] = "integer histogram"


@pytest.mark.parametrize(
    "lie", [less_epsilon, with_delta, another_delta, a_network_is_covered, no_noise_on_some]
)
def test_a_false_card_of_a_census_is_violated(
    lie: Callable[[dict[str, Any]], None], trained: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    card = card_of(run)
    lie(card)
    card["sentence"] = guarantee_sentence(card)
    (run / "privacy.json").write_text(json.dumps(card))
    status, text = audited(run)
    assert status == 1, text


@pytest.mark.skipif(not verify.available(), reason="dp-accounting is not installed")
def test_the_auditors_program_adds_up_laplace_events(trained: Path) -> None:
    status, program = audited(trained, "--dp-event")
    assert status == 0
    assert "privssl" not in program and "the discrete law" in program
    assert program.count("dp.LaplaceDpEvent(0.25), 1)") == 2
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(program, {})  # noqa: S102  what an auditor would do with it
    assert printed.getvalue().splitlines() == ["epsilon at most 4.0 at delta 0"] * 2


@pytest.mark.skipif(not verify.available(), reason="dp-accounting is not installed")
def test_at_a_positive_delta_the_continuous_laplace_would_claim_too_little() -> None:
    # Why the program calls no accountant: for this noise the true epsilon, of randomized response,
    # is higher.
    import dp_accounting as dp

    many = [PureDpEvent(0.1, 50)]
    continuous = dp.pld.PLDAccountant(value_discretization_interval=1e-4)
    continuous.compose(dp.SelfComposedDpEvent(dp.LaplaceDpEvent(10.0), 50))
    assert continuous.get_epsilon(1e-5) < verify.pld_bracket(many, 1e-5).lower - 0.04


# Epsilon 0, and accounts that outlive a run ---------------------------------------------------


class Sealed(LabelledRows):
    """Labelled rows that must not be read; their number is public."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("x", "y"):
            raise AssertionError("a labelled row was read")
        return super().__getattribute__(name)


def carried_out_sealed(folder: Path, epsilon: float) -> None:
    """Run without access to any labelled row, except for the split."""
    epsilon_given = f"privacy.epsilon={epsilon}"
    prepared = prepare(configs.load_config(CONFIG, [*SMALL, epsilon_given, f"run.output={folder}"]))
    for agent in prepared.labelled_agents:
        rows = agent.labelled
        agent.held_labelled = Sealed(rows.x, rows.y, rows.ids)
    with run_dir.create_run_dir(prepared) as made:
        round_loop.train(prepared, made, lambda: [], None)


def test_with_epsilon_zero_no_labelled_row_is_read_and_the_run_completes(tmp_path: Path) -> None:
    carried_out_sealed(tmp_path / "run", 0.0)
    assert "is 0-DP (pure epsilon, delta 0 for" in card_of(tmp_path / "run")["sentence"]
    journals = [read_journal(path) for path in (tmp_path / "run/ledger").glob("*.jsonl")]
    assert [journal.events for journal in journals] == [[], []]
    assert audited(tmp_path / "run")[0] == 3  # no config.yaml was written


def test_the_seal_detects_a_census(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="a labelled row was read"):
        carried_out_sealed(tmp_path / "run", 4.0)


def test_two_censuses_of_the_same_rows_add_up_and_a_third_exceeds_the_budget(
    tmp_path: Path,
) -> None:
    ledger = (f"privacy.ledger={tmp_path / 'accounts'}", "privacy.ledger_epsilon=9.0")
    split = f"data.split={tmp_path / 'one' / 'split.json'}"
    assert train(tmp_path / "one", *ledger).status == 0
    assert train(tmp_path / "two", *ledger, split).status == 0
    assert card_of(tmp_path / "one")["guarantee"]["epsilon"] == 4.0
    second = card_of(tmp_path / "two")
    assert (second["guarantee"]["epsilon"], second["guarantee"]["delta"]) == (8.0, 0.0)
    assert second["this_run"] == {"s0": 4.0, "s1": 4.0}
    refused = train(tmp_path / "three", *ledger, split)
    assert refused.status == 0, refused
    assert "privacy budget ended visits to support agents early" in refused.out
    third = card_of(tmp_path / "three")
    assert third["guarantee"]["epsilon"] == 8.0
    assert third["this_run"] == {"s0": 0.0, "s1": 0.0}
    assert [len(read_journal(p).events) for p in (tmp_path / "accounts").glob("*.jsonl")] == [2, 2]
    for name in ("one", "two", "three"):
        assert audited(tmp_path / name)[0] == 0


def test_a_census_is_charged_before_its_rows_are_read(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="a labelled row was read"):
        carried_out_sealed(tmp_path / "run", 4.0)
    first = read_journal(tmp_path / "run/ledger/s0.jsonl")
    assert first.events == [PureDpEvent(4.0, 1)]


def released_by_all(folder: Path, epsilon: float) -> Tensor:
    """The sum of what the support agents of a small run release at this epsilon (K, C)."""
    given = [*SMALL, f"privacy.epsilon={epsilon}", f"run.output={folder}"]
    prepared = prepare(configs.load_config(CONFIG, given))
    folder.mkdir()
    federation = Federation(
        LocalEngine(prepared.federated_data.agents, seed=0, device=prepared.device), 0
    )
    state = prepared.algorithm.start(federation)
    with accounts.open_accounts(prepared, folder, None):
        for now in planned_rounds(prepared.algorithm.phases()):
            if now.phase in ("encoder", "clusters", "census"):
                federation.begin(now)
                state = prepared.algorithm.round(state, federation)
    released: Tensor = state.histogram
    return released


def test_every_count_that_a_support_agent_sends_has_its_noise(tmp_path: Path) -> None:
    # At epsilon 0.01 a draw has standard deviation 141, and the sum of two is 0 once in 400 times.
    noisy = released_by_all(tmp_path / "noisy", 0.01)
    assert int((noisy.abs() > 100).sum()) > noisy.numel() / 4
    assert int((noisy == 0).sum()) < noisy.numel() / 10
    # the control: at epsilon 40 the noise rounds to zero, and the counts are those of 40 rows
    exact = released_by_all(tmp_path / "exact", 40.0)
    assert int(exact.min()) == 0
    assert int(exact.sum()) == 40


@pytest.mark.slow
def test_a_checkpoint_is_written_right_after_the_census(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, save = [], checkpoint.save_snapshot

    def record(folder: Path, snapshot: Snapshot) -> Path:
        saved.append(snapshot.round)
        return save(folder, snapshot)

    monkeypatch.setattr(checkpoint, "save_snapshot", record)
    assert train(tmp_path / "run", "run.checkpoint_every=1000").status == 0
    before = 3 + 3  # rounds of encoder and clusters
    # the start, the census, and the end
    assert saved == [0, before + 1, before + 1 + 2]


# What a method may count ----------------------------------------------------------------------


@dataclass(frozen=True)
class Answer(Message):
    census: Tensor


def above_the_mean_of_all(rows: Any) -> Tensor:
    cluster = (rows.x.flatten() > rows.x.mean()).long()
    counts = torch.zeros(2, 2, dtype=torch.int64)
    return counts.index_put((cluster, rows.y), torch.tensor(1), accumulate=True)


def above_one_half(rows: Any) -> Tensor:
    return count_rows(rows, lambda row: (row.flatten() > 0.5).long(), 2, 2)


def above_the_mean_so_far(rows: Any) -> Tensor:
    seen = list[float]()

    def cluster_of(row: Tensor) -> Tensor:
        seen.append(float(row))
        return (row.flatten() >= sum(seen) / len(seen)).long()

    return count_rows(rows, cluster_of, 2, 2)


def cumulative(rows: Any) -> Tensor:
    return above_one_half(rows).cumsum(dim=0)


def tenfold(rows: Any) -> Tensor:
    return 10 * above_one_half(rows)


def the_purer_of_two(rows: Any) -> Tensor:
    return max(
        (
            count_rows(rows, lambda row, at=at: (row.flatten() > at).long(), 2, 2)  # type: ignore[misc]
            for at in (0.2, 0.8)
        ),
        key=lambda table: int(table.amax(dim=1).sum()),
    )


def another_if_one_fails(rows: Any) -> Tensor:
    try:
        return count_rows(rows, lambda row: torch.tensor([3 * int(row > 0.9)]), 2, 2)
    except PrivacyError:
        return above_one_half(rows)


class OwnFeatures:
    """A census of one's own that inherits privssl's clusters, and centres features itself."""

    cluster_of = FeatureMapRounds.cluster_of

    def __init__(self) -> None:
        self.seen = list[float]()

    def compute_points(self, x: Tensor, msg: Map, device: torch.device) -> Tensor:
        self.seen.append(float(x))
        return x - sum(self.seen) / len(self.seen)


def inherited(features: OwnFeatures) -> Callable[[Any], Tensor]:
    ends, device = torch.tensor([[-0.1], [0.1]]), torch.device("cpu")
    found = Map({}, torch.zeros(1), ends, torch.arange(2))
    ctx = Context(0, 1, "s0", "", "", device)
    cluster_of = partial(features.cluster_of, msg=found, ctx=ctx)  # type: ignore[misc]
    return lambda rows: count_rows(rows, cluster_of, 2, 2)


def six_rows() -> LabelledRows:
    return LabelledRows(torch.linspace(0, 1, 6).view(6, 1), torch.arange(6) % 2, torch.arange(6))


@dataclass
class SingleAgent:
    """One support agent that answers a census of two clusters and two classes."""

    folder: Path

    def __call__(self, counted: Callable[[Any], Tensor]) -> Tensor:
        def answer(agent: Any, message: Ack, ctx: Any) -> Answer:
            with agent.account.spend(PLAN.event, ctx.charge_id):
                return Answer(PLAN.release(counted(agent.labelled)))

        promise = AccountPlan(
            agent="s0", budget=Budget(2.0, 1e-5), scope="sound", update=PLAN.update,
            protect=PLAN.protect, event=PLAN.event, n_public=6,
        )  # fmt: skip
        account = Account.open(self.folder / "s0.jsonl", promise, resume=False)
        agent = Agent(id="s0", held_labelled=six_rows(), account=account)
        engine = LocalEngine([agent], seed=0, device=torch.device("cpu"))
        with contextlib.closing(engine):
            [reply] = engine.deliver([Call(engine.roster()[0], answer, Ack(), 1)])
        return reply.payload.census  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("counted", "why"),
    [
        (above_the_mean_of_all, "count_rows"),
        (above_the_mean_so_far, "the cluster of a row depends on the rows before it"),
        (inherited(OwnFeatures()), "the cluster of a row depends on the rows before it"),
        (another_if_one_fails, "a private mechanism failed in it"),
        (cumulative, "these were changed, so one row could move them by more than 1"),
        (tenfold, "these were changed, so one row could move them by more than 1"),
        (the_purer_of_two, "and 2 were: which of several is released could follow from the rows"),
        (lambda rows: torch.zeros(2, 2, dtype=torch.int64), "and 0 were"),
    ],
)
def test_a_census_releases_one_count_per_row_as_it_was_assigned(
    counted: Callable[[Any], Tensor], why: str, tmp_path: Path
) -> None:
    with pytest.raises(PrivacyError, match=why):
        SingleAgent(tmp_path)(counted)
    SingleAgent(tmp_path / "control")(above_one_half)


def test_a_charged_step_sees_no_exact_count(tmp_path: Path) -> None:
    seen: list[Tensor] = []

    def looks(rows: Any) -> Tensor:
        seen.append(above_one_half(rows))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(label_histogram, "discrete_laplace", lambda epsilon, n: np.zeros(n, np.int64))
        released = SingleAgent(tmp_path)(looks)
    assert not seen[0].any() and released.tolist() == [[2, 1], [1, 2]]
    assert torch.equal(looks(six_rows()), released)  # the control: without an account


@pytest.mark.parametrize("secret", ["class 1", "a row of 0.8"])
def test_an_error_in_a_cluster_function_shows_no_row_and_no_label(
    secret: str, tmp_path: Path
) -> None:
    def fails(row: Tensor) -> Tensor:
        if float(row) > 0.7:
            raise ValueError(secret)
        return (row.flatten() > 0.5).long()

    with pytest.raises(PrivacyError, match="fails on labelled rows: ValueError in fails") as error:
        SingleAgent(tmp_path)(lambda rows: count_rows(rows, fails, 2, 2))
    assert secret not in "".join(traceback.format_exception(error.value))


@pytest.mark.parametrize(
    ("counted", "refused"), [(above_the_mean_of_all, True), (above_one_half, False)]
)
def test_a_census_assigns_rows_one_at_a_time_so_that_no_row_moves_the_cluster_of_another(
    counted: Callable[[Any], Tensor], refused: bool, tmp_path: Path
) -> None:
    error = pytest.raises(PrivacyError, match=r"read outside of private training.*count_rows")
    with error if refused else contextlib.nullcontext():
        assert SingleAgent(tmp_path)(counted).shape == (2, 2)
    # Without an account each row counts.
    assert counted(six_rows()).tolist() == [[2, 1], [1, 2]]
