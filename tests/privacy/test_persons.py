"""Guarantees for persons: all rows of one count as a row counts, and no run claims more.

Every check of a guarantee has a negative control.
"""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import privssl
from accounting.account_plan import AccountPlan
from accounting.budget import Budget, Guarantee
from accounting.discrete_laplace import log_pmf
from accounting.errors import LedgerError, PlanError
from accounting.ledger import Account
from privssl.audit import __main__ as audit
from privssl.audit import mechanism_attack
from privssl.core.agents import Agent, LabelledRows, UnlabelledRows, rows_by_person
from privssl.core.engine import Call
from privssl.core.messages import Message
from privssl.data import build
from privssl.data.split_manifest import AgentRows
from privssl.engines.local import LocalEngine
from privssl.errors import ConfigError, PrivacyError, UserError
from privssl.experiment.account_rows import claim_rows, limit_rows
from privssl.experiment.config import load_config
from privssl.experiment.warm_start import check_warm_start
from privssl.privacy import local_dp_sgd
from privssl.privacy.label_histogram import CensusPlan, count_rows, make_census_plan
from privssl.privacy.local_dp_sgd import train_rows_privately
from privssl.privacy.persons import choose_few_of_each, choose_rows
from privssl.privacy.plan import PrivatePlan
from privssl.settings.schema import PrivacySettings
from privssl.train import main
from privssl.training.batched.deferred import ExampleLoss
from privssl.training.losses import hard_label_loss
from tests.support.private_fedssl import context
from tests.support.toy_worlds import without_noise

CONFIGS = Path(__file__).parents[2] / "configs"
#: Five rows of a, one of b, four of c and two of d, mixed.
PERSONS = tuple("abacacdacacd")
ROWS = len(PERSONS)
OF_A = torch.tensor([i for i, name in enumerate(PERSONS) if name == "a"])
NOT_OF_A = torch.tensor([i for i, name in enumerate(PERSONS) if name != "a"])


def rows_of(persons: Sequence[str] | None = PERSONS, count: int = ROWS) -> LabelledRows:
    rng = torch.Generator().manual_seed(3)
    x, ids = torch.rand(count, 4, generator=rng), torch.arange(count)
    return LabelledRows(x, ids % 3, ids, persons=None if persons is None else tuple(persons))


def select(rows: LabelledRows, kept: Tensor) -> LabelledRows:
    persons = rows.persons and tuple(rows.persons[i] for i in kept)
    return LabelledRows(rows.x[kept], rows.y[kept], rows.ids[kept], persons=persons)


# Groups ---------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from("abcde"), max_size=20))
def test_every_row_belongs_to_the_group_of_its_person(persons: list[str]) -> None:
    groups = rows_by_person(persons)
    assert sorted(row for group in groups.values() for row in group) == list(range(len(persons)))
    assert all(persons[row] == name for name, group in groups.items() for row in group)


@given(st.integers(1, 7), st.integers(1, 20), st.integers(0, 99))
def test_a_row_of_a_person_is_chosen_again_only_after_all_its_others(
    rows: int, count: int, seed: int
) -> None:
    group = torch.arange(rows) + 10
    chosen = choose_rows(group, count, torch.Generator().manual_seed(seed)).tolist()
    times = [chosen.count(row) for row in group.tolist()]
    assert sum(times) == count and max(times) - min(times) <= 1


@pytest.mark.parametrize("count", [1, 2, 9])
def test_a_few_rows_of_each_person_are_chosen_whoever_else_is_there(count: int) -> None:
    chosen = choose_few_of_each(PERSONS, count).tolist()
    assert len(set(chosen)) == len(chosen)
    for name in "abcd":
        own = [row for row in chosen if PERSONS[row] == name]
        assert len(own) == min(count, PERSONS.count(name))
        alone = [row for row in range(ROWS) if PERSONS[row] == name]
        assert own == [alone[i] for i in choose_few_of_each([name] * len(alone), count)]
    assert choose_few_of_each((), count).tolist() == []


# DP-SGD ---------------------------------------------------------------------------------------

CLIP = 0.1


def plan(**changes: Any) -> PrivatePlan:
    numbers: dict[str, Any] = {
        "update": ("F",), "protect": ("F",), "noise_multiplier": 1.0, "clip_norm": CLIP,
        "sample_rate": 1.0, "steps": 1, "expected_batch": 1.0, "learning_rate": 1.0,
        "momentum": 0.0, "views": 1, "visits": 1,
    }  # fmt: skip
    return PrivatePlan(**(numbers | changes))


def moved_by(rows: LabelledRows, **changes: Any) -> Tensor:
    """What a visit adds to the weights: without noise, minus the clipped sum of one step."""
    torch.manual_seed(0)
    F, chosen = nn.Linear(4, 3).double(), plan(**changes)
    before = torch.cat([p.detach().flatten() for p in F.parameters()]).clone()

    def draw(x: Tensor, y: Tensor, _: Any) -> dict[str, Tensor]:
        return {"x": x.double(), "y": y}

    train_rows_privately(
        chosen, {"F": F}, rows, context("s0"), draw, ExampleLoss(hard_label_loss, (), {"F": F}),
        counts_public=chosen.record_counts == "public",
    )  # fmt: skip
    return torch.cat([p.detach().flatten() for p in F.parameters()]) - before


def largest_shift(rows: LabelledRows, changed: Tensor, **changes: Any) -> float:
    """The distance between sums of the rows and of the same with some replaced, in clip norms."""
    x = rows.x.clone()
    x[changed] = torch.nan  # empty rows: their gradient adds nothing
    other = dataclasses.replace(rows, x=x)
    return float((moved_by(rows, **changes) - moved_by(other, **changes)).norm()) / CLIP


@pytest.mark.parametrize("views", [1, 4])
def test_all_rows_of_a_person_move_a_sum_by_at_most_one_clip_norm(
    views: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_noise(monkeypatch)
    assert largest_shift(rows_of(), OF_A, views=views) == pytest.approx(1.0, abs=1e-5)
    # The control: as records, its five rows move the sum by more.
    assert largest_shift(rows_of(None), OF_A, views=views) > 1.5


@pytest.mark.parametrize("views", [1, 4])
def test_with_private_counts_a_person_more_moves_a_sum_by_at_most_one_clip_norm(
    views: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_noise(monkeypatch)
    private: dict[str, Any] = {"record_counts": "private", "views": views}
    without = select(rows_of(), NOT_OF_A)
    shift = float((moved_by(rows_of(), **private) - moved_by(without, **private)).norm()) / CLIP
    assert shift == pytest.approx(1.0, abs=1e-5)


def test_a_visit_samples_persons_and_not_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    draw_batch = PrivatePlan.draw_batch

    def record(self: PrivatePlan, rows: int) -> Tensor:
        asked.append(rows)
        return draw_batch(self, rows)

    monkeypatch.setattr(PrivatePlan, "draw_batch", record)
    moved_by(rows_of(), sample_rate=0.5, steps=3)
    assert asked == [4, 4, 4]


def test_over_steps_a_person_is_trained_on_all_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    without_noise(monkeypatch)
    seen = set[int]()
    rows = rows_of()

    def draw(x: Tensor, y: Tensor, _: Any) -> dict[str, Tensor]:
        seen.update(int(i) for row in x for i in (rows.x == row).all(1).nonzero())
        return {"x": x, "y": y}

    F = nn.Linear(4, 3)
    train_rows_privately(
        plan(steps=40), {"F": F}, rows, context("s0"), draw,
        ExampleLoss(hard_label_loss, (), {"F": F}), counts_public=True,
    )  # fmt: skip
    assert seen == set(range(ROWS))


def test_rows_of_one_person_each_train_as_records_do(monkeypatch: pytest.MonkeyPatch) -> None:
    without_noise(monkeypatch)
    single = rows_of([str(i) for i in range(ROWS)])
    assert torch.equal(moved_by(single), moved_by(rows_of(None)))


# The census -----------------------------------------------------------------------------------


def count(rows: LabelledRows) -> Tensor:
    return count_rows(rows, lambda row: (row[:, 0] > 0.5).long(), 2, 3)


def largest_ratio(one: Tensor, other: Tensor, epsilon: float) -> float:
    """The largest log ratio of the probabilities of one noisy table given two true ones."""
    ends = torch.stack([one, other]).double().numpy()
    ratios = log_pmf(epsilon, ends - one.numpy()) - log_pmf(epsilon, ends - other.numpy())
    return float(np.abs(ratios).max(axis=0).sum())


@pytest.mark.parametrize("k", [1, 2, 3])
def test_all_rows_of_a_person_cost_a_census_at_most_its_epsilon(k: int) -> None:
    settings = PrivacySettings(epsilon=3.0, unit="person", rows_per_person=k)
    census = make_census_plan(settings, rows=4.0)
    assert census.event.epsilon == pytest.approx(3.0, abs=1e-5) and census.rows == 4.0 * k
    assert census.event.epsilon <= 3.0
    agents = [
        Agent(id="s0", held_labelled=rows) for rows in (rows_of(), select(rows_of(), NOT_OF_A))
    ]
    limit_rows(census, agents)
    whole, without = (count(agent.labelled) for agent in agents)
    assert int((whole - without).sum()) == k
    assert largest_ratio(whole, without, census.epsilon) <= census.event.epsilon + 1e-9
    # The control: all five rows of the person, with noise for k.
    apart = count(rows_of(None)) - count(select(rows_of(None), NOT_OF_A))
    assert largest_ratio(apart, 0 * apart, census.epsilon) > census.event.epsilon


def test_a_census_refuses_more_rows_of_a_person_than_its_noise_is_for(tmp_path: Path) -> None:
    with pytest.raises(PrivacyError, match="a person has 5 rows in a census whose noise is for 1"):
        answer_for("person", rows_of(), tmp_path, len)
    one_each = select(rows_of(), choose_few_of_each(PERSONS, 1))
    answer_for("person", one_each, tmp_path / "control", len)


def test_a_number_of_rows_that_nothing_counts_is_refused() -> None:
    for config, settings in (
        ("fedssl_dp.yaml", ["privacy.unit=person", "privacy.rows_per_person=2"]),
        ("label_census.yaml", ["privacy.rows_per_person=2"]),
    ):
        with pytest.raises(ConfigError, match=r"it belongs to a label census with privacy\.unit"):
            load_config(CONFIGS / config, settings)


# Steps ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sent(Message):
    census: Tensor


def answer_for(unit: Any, rows: LabelledRows, folder: Path, read: Callable[[Any], Any]) -> None:
    """Run a charged step of one agent whose account has this unit."""
    census = CensusPlan(2.0, visits=1)

    def step(agent: Any, message: Message, ctx: Any) -> Sent:
        with agent.account.spend(census.event, ctx.charge_id):
            read(agent.labelled)
            return Sent(census.release(count(agent.labelled)))

    promise = AccountPlan(
        agent="s0", budget=Budget(2.0, 1e-5), scope="sound", update=census.update,
        protect=census.protect, event=census.event, n_public=len(rows), unit=unit,
    )  # fmt: skip
    account = Account.open(folder / "s0.jsonl", promise, resume=False)
    agent = Agent(id="s0", held_labelled=rows, account=account)
    with contextlib.closing(LocalEngine([agent], seed=0, device=torch.device("cpu"))) as engine:
        list(engine.deliver([Call(engine.roster()[0], step, Sent(torch.zeros(1)), 1)]))


@pytest.mark.parametrize("unit", ["record", "person"])
def test_no_step_runs_under_an_account_of_another_unit_than_its_rows(
    unit: str, tmp_path: Path
) -> None:
    other = rows_of() if unit == "record" else rows_of(None)
    with pytest.raises(PrivacyError, match=f"the unit of its account is a {unit}"):
        answer_for(unit, other, tmp_path, len)
    own = rows_of(None) if unit == "record" else select(rows_of(), choose_few_of_each(PERSONS, 1))
    answer_for(unit, own, tmp_path / "control", len)


def test_only_a_private_mechanism_reads_whose_rows_are_whose(tmp_path: Path) -> None:
    with pytest.raises(PrivacyError, match="labelled rows were read outside of private training"):
        answer_for("person", rows_of(), tmp_path, lambda rows: rows.persons)


def test_a_plan_for_persons_is_sound_or_refused() -> None:
    census = CensusPlan(2.0, visits=1)
    common: dict[str, Any] = {
        "agent": "s0", "budget": Budget(2.0, 1e-5), "event": census.event, "n_public": 6,
        "update": ("F", "G"), "protect": ("G",), "scope": "as_published",
    }  # fmt: skip
    with pytest.raises(PlanError, match="unit person needs scope sound"):
        AccountPlan(**common, unit="person")
    AccountPlan(**common)


# One person, one account ----------------------------------------------------------------------


def agent_with(name: str, persons: str, start: int) -> Agent:
    """An agent with rows of its own of these persons."""
    x = torch.arange(start, start + 4 * len(persons)).view(-1, 4).float()
    ids = torch.arange(len(persons))
    return Agent(id=name, held_labelled=LabelledRows(x, ids % 2, ids, persons=tuple(persons)))


def test_a_lasting_account_refuses_a_person_that_another_one_has(tmp_path: Path) -> None:
    claim_rows(tmp_path, [agent_with("s0", "aab", 0)], [])
    with pytest.raises(LedgerError, match="1 rows would be in the accounts of s0 and of s1"):
        claim_rows(tmp_path, [agent_with("s1", "bc", 100)], [])
    unlabelled = UnlabelledRows(torch.ones(1, 4), torch.arange(1), persons=("a",))
    with pytest.raises(LedgerError, match=r"1 rows in the account of s0 .* without"):
        claim_rows(tmp_path, [], [unlabelled])
    claim_rows(tmp_path, [agent_with("s1", "cd", 100)], [])  # the control: other persons


def test_an_attack_sees_a_person_who_counts_once_for_each_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few = plan(steps=2, sample_rate=0.5, noise_multiplier=2.0)
    measure = mechanism_attack._measure_view_sensitivity
    assert measure(few, True, "person") <= 1 + 1e-6
    # The control: without groups each of its two rows is clipped alone.
    monkeypatch.setattr(local_dp_sgd, "rows_by_person", lambda of: {i: [i] for i in range(len(of))})
    assert measure(few, True, "person") == pytest.approx(2.0, abs=1e-3)


# Runs -----------------------------------------------------------------------------------------


def digits(persons: Any, **changes: Any) -> privssl.Dataset:
    found = np.load(Path(privssl.__file__).parent / "data" / "digits.npz")
    arrays = {name: found[name] for name in ("x_train", "y_train", "x_test", "y_test")}
    return privssl.Dataset.from_arrays(**arrays, persons=persons, **changes)


OF_DIGITS = np.random.default_rng(0).integers(0, 400, 1437)
SMALL = {
    "data.labelled": 60, "algorithm.rounds": 1, "privacy.unit": "person", "run.workers": 1,
    "privacy.steps": 3, "privacy.views": 2, "algorithm.local_steps": 2, "algorithm.warm_up": 0,
}  # fmt: skip


@pytest.mark.parametrize("counts", ["public", "private"])
def test_a_run_for_persons_says_so_and_its_audit_is_consistent(counts: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    settings = SMALL | {"privacy.record_counts": counts}
    run = privssl.train(CONFIGS / "fedssl_dp.yaml", settings, data=digits(OF_DIGITS), output=folder)
    words = {
        "public": "replacing all labelled records of one person at that agent by empty ones",
        "private": "adding or removing all labelled records of one person at that agent",
    }[counts]
    assert run.guarantee is not None and words in run.guarantee
    assert "people with records at more than one agent" in run.guarantee
    card = json.loads((folder / "privacy.json").read_text())
    assert (card["unit"], card["guarantee"]["unit"]) == ("person", "person")
    page = (folder / "privacy.md").read_text()
    assert "Unit: one person" in page and "Clip norm of one person's gradient" in page
    assert "from the labelled rows of 60 persons" in (folder / "model_card.md").read_text()
    split = json.loads((folder / "split.json").read_text())["agents"]
    assert [len({OF_DIGITS[i] for i in split[a]["labelled"]}) for a in ("s0", "s1")] == [30, 30]
    assert audit.audit(folder).verdict == audit.Verdict.CONSISTENT
    # A config that asks for records is another one.
    text = (folder / "config.yaml").read_text()
    assert "unit: person" in text
    (folder / "config.yaml").write_text(text.replace("unit: person", "unit: record"))
    problems = "\n".join(audit.audit(folder).problems)
    assert "config.yaml asks for the unit of record, the ledger of s0 has person" in problems


def test_weights_that_saw_rows_of_a_person_under_another_unit_are_refused(tmp_path: Path) -> None:
    """Whether the run before was not private, or private for records only."""
    small = {"data.labelled": 200, "algorithm.rounds": 1, "run.workers": 1}
    plain = {"data.labels": "support", "agents.mixed": 0, "agents.support": 2}
    private = {"privacy.steps": 1, "privacy.visits": None}
    for name, config, changes, why in (
        ("plain", "fedavg.yaml", plain, "without protection"),
        ("records", "fedavg_dp.yaml", private, "without protection"),
    ):
        privssl.train(CONFIGS / config, small | changes, data=digits(None), output=tmp_path / name)
        weights = str(tmp_path / name / "classifier.safetensors")
        person = small | private | {"privacy.unit": "person", "model.weights": weights}
        with pytest.raises(UserError, match=why):
            privssl.train(
                CONFIGS / "fedavg_dp.yaml", person, data=digits(OF_DIGITS), output=tmp_path / "run"
            )  # fmt: skip


def test_weights_that_saw_an_unused_row_of_a_labelled_person_are_refused(tmp_path: Path) -> None:
    """A row that has no label here, and so is used nowhere, had one there or was unlabelled."""
    found = np.load(Path(privssl.__file__).parent / "data" / "digits.npz")
    y = found["y_train"].astype(np.int64)
    of_one, tests = np.flatnonzero(OF_DIGITS[0] == OF_DIGITS), (found["x_test"], found["y_test"])
    unused = int(of_one[-1])
    assert len(of_one) > 1
    y[unused] = -1
    data = privssl.Dataset.from_arrays(found["x_train"], y, *tests, persons=OF_DIGITS)
    small = {"data.labelled": len(set(OF_DIGITS)), "agents.query": 0}
    config = load_config(
        CONFIGS / "fedavg_dp.yaml",
        [f"{k}={v}" for k, v in small.items()] + ["privacy.unit=person"],
    )
    split = build(config.data, config.agents, 0, data.rows).manifest
    held = {row for h in split.agents.values() for row in (*h.labelled, *h.unlabelled)}
    assert unused not in held  # its person has labelled rows
    folder = tmp_path / "former"
    folder.mkdir()
    others = {"s0": AgentRows((), (unused,))}
    weights = config.model.__class__(weights=str(folder / "classifier.safetensors"))
    chosen = dataclasses.replace(config, model=weights)
    for agents, refused in ((others, True), ({"s0": AgentRows((), ())}, False)):
        dataclasses.replace(split, agents=agents, validation=()).write(folder / "split.json")
        found_warnings = check_warm_start(chosen, split, nn.Identity)
        if refused:
            with pytest.raises(PrivacyError, match="used 1 labelled rows of this run without"):
                list(found_warnings)
        else:  # the control
            assert list(found_warnings) == []


def test_a_dry_run_for_persons_counts_them_and_measures_a_visit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    found = np.load(Path(privssl.__file__).parent / "data" / "digits.npz")
    np.savez("rows.npz", **{n: found[n] for n in found.files}, person_train=OF_DIGITS)
    settings = [f"{k}={v}" for k, v in SMALL.items()]
    config = str(CONFIGS / "fedssl_dp.yaml")
    assert main([config, "data.name=npz", "data.root=rows.npz", *settings, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("of 30 persons") == 2 and "cannot be estimated" not in printed


@pytest.mark.parametrize(
    ("persons", "unit", "why"),
    [
        (None, "person", "privacy.unit is person, and the rows name no persons"),
        (OF_DIGITS, "record", "the rows name persons, and privacy.unit is record"),
    ],
)
def test_a_run_is_refused_where_unit_and_rows_differ(
    persons: Any, unit: str, why: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=why):
        privssl.train(
            CONFIGS / "fedssl_dp.yaml", SMALL | {"privacy.unit": unit}, data=digits(persons),
            output=tmp_path / "run",
        )  # fmt: skip


@pytest.mark.parametrize("other", ["s1", "q0"])
def test_a_person_with_rows_at_two_places_is_refused(other: str, tmp_path: Path) -> None:
    found = np.load(Path(privssl.__file__).parent / "data" / "digits.npz")
    x, y = found["x_train"], found["y_train"]
    rows = {"s0": (x[:20], y[:20]), "s1": (x[20:40], y[20:40]), "q0": x[40:60]}
    names = {agent: [f"{agent}/{i // 2}" for i in range(20)] for agent in rows}
    config = CONFIGS / "label_census.yaml"
    tests = (found["x_test"], found["y_test"])
    settings = {"privacy.unit": "person"}
    names[other][3] = names["s0"][7]
    data = privssl.Dataset.federated(rows, tests, persons=names)
    with pytest.raises(UserError, match="have rows of one person, who would have two budgets"):
        privssl.train(config, settings, data=data, output=tmp_path / "run")


def test_persons_in_the_published_scheme_are_refused_at_their_key() -> None:
    with pytest.raises(ConfigError, match=r"privacy\.unit +person, and the published scheme"):
        load_config(CONFIGS / "fedssl_dp_as_published.yaml", ["privacy.unit=person"])


def test_the_sentence_for_records_is_what_it_was() -> None:
    claim = Guarantee(8.0, 1e-5, "record", "zero_out", ("F",), "largest agent")
    assert "replacing one labelled record of that agent by an empty one (counts are" in str(claim)
    assert "Not covered: data of query agents, people with more than one record," in str(claim)
