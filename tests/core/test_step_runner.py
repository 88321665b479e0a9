"""What a step may read, send and store: the mistakes that an honest author of a step can make."""

import contextlib
import dataclasses
import errno
import os
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from accounting.account_plan import AccountPlan
from accounting.budget import Budget
from accounting.errors import LedgerError
from accounting.events import PoissonSampledGaussianEvent
from accounting.ledger import Account, read_journal
from privssl.core.agents import Agent, LabelledRows, UnlabelledRows
from privssl.core.engine import Call
from privssl.core.messages import Ack, Declined, Message, MessageError, StateDict
from privssl.core.private_release import (
    begin_release,
    errors_without_rows,
    mechanism_reads,
    record_release,
)
from privssl.engines.local import LocalEngine
from privssl.errors import PrivacyError

LABELLED = LabelledRows(torch.rand(4, 1, 8, 8), torch.tensor([0, 1, 1, 0]), torch.arange(4))
UNLABELLED = UnlabelledRows(torch.rand(3, 1, 8, 8), torch.arange(4, 7))
EVENT = PoissonSampledGaussianEvent(4.0, 0.5, 10)
PLAN = AccountPlan(
    agent="m0", budget=Budget(100.0, 1e-5), scope="sound", update=("F",), protect=("F",),
    event=EVENT, n_public=4,
)  # fmt: skip


@dataclass(frozen=True)
class Mechanism:
    event: PoissonSampledGaussianEvent


MECHANISM = Mechanism(EVENT)
Visit = Callable[[Any, "Sent", Any], Any]


@dataclass(frozen=True)
class Sent(Message):
    F: Tensor | None = None
    counts: Tensor | None = None


@dataclass(frozen=True)
class Weights(Message):
    F: StateDict | None = None


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[LocalEngine]:
    """An engine with one mixed agent whose labelled rows have an account."""
    account = Account.open(tmp_path / "m0.jsonl", PLAN, resume=False)
    agent = Agent(id="m0", held_labelled=LABELLED, held_unlabelled=UNLABELLED, account=account)
    agent.memory = {"old": torch.zeros(2)}
    engine = LocalEngine([agent], seed=0, device=torch.device("cpu"))
    yield engine
    engine.close()


def run_step(engine: LocalEngine, step: Visit) -> Any:
    [reply] = engine.deliver([Call(engine.roster()[0], step, Sent(), 1)])
    return reply


def charged(inside: Visit) -> Visit:
    """A step that charges its account, and then runs ``inside``."""

    def step(agent: Any, message: Sent, ctx: Any) -> Any:
        with agent.account.spend(EVENT, ctx.charge_id):
            begin_release()
            record_release(MECHANISM, "F", torch.ones(2))
            with mechanism_reads():
                return inside(agent, message, ctx)

    return step


def release_f(agent: Any, message: Sent, ctx: Any) -> Sent:
    assert len(agent.labelled) == 4 and agent.labelled.y.tolist() == [0, 1, 1, 0]
    ctx.log_metric("loss", 1.0)  # dropped: there is an account
    return Sent(F=torch.ones(2))


def charge_count(tmp_path: Path) -> int:
    return len(read_journal(tmp_path / "m0.jsonl").visits)


def test_a_charged_step_that_sends_only_what_its_plan_names_succeeds(
    engine: LocalEngine, tmp_path: Path
) -> None:
    reply = run_step(engine, charged(release_f))
    assert reply.payload.F.tolist() == [1, 1] and (reply.weight, reply.metrics) == (1.0, {})
    assert charge_count(tmp_path) == 1


# Before the charge ---------------------------------------------------------------------------


def train_without_charge(agent: Any, message: Sent, ctx: Any) -> Sent:
    return Sent(F=agent.labelled.x.mean(dim=0))


def send_row_count(agent: Any, message: Sent, ctx: Any) -> Sent:
    ctx.weight = float(len(agent.labelled))
    return Sent(F=torch.ones(2))


def decide_by_labels(agent: Any, message: Sent, ctx: Any) -> Any:
    if agent.labelled.y.float().mean() > 0.9:
        return Declined("knows enough")
    return charged(release_f)(agent, message, ctx)


def train_on_both_kinds_of_rows(agent: Any, message: Sent, ctx: Any) -> Sent:
    """Use labelled rows in a query pass, as semi-supervised methods do."""
    return Sent(F=torch.cat([agent.unlabelled.x, agent.labelled.x]).mean(dim=0))


@pytest.mark.parametrize(
    "step", [train_without_charge, send_row_count, decide_by_labels, train_on_both_kinds_of_rows]
)
def test_a_step_cannot_read_labelled_rows_before_its_charge(
    engine: LocalEngine, tmp_path: Path, step: Visit
) -> None:
    with pytest.raises(PrivacyError, match="before their account was charged"):
        run_step(engine, step)
    assert charge_count(tmp_path) == 0


def test_a_visit_cannot_read_rows_under_the_charge_of_an_earlier_visit(engine: LocalEngine) -> None:
    run_step(engine, charged(release_f))
    with pytest.raises(PrivacyError, match="before their account was charged"):
        run_step(engine, train_without_charge)


def test_without_an_account_a_step_reads_labelled_rows_freely(engine: LocalEngine) -> None:
    engine._agents["m0"].account = None
    assert run_step(engine, send_row_count).weight == 4.0
    assert run_step(engine, train_on_both_kinds_of_rows).payload.F.shape == (1, 8, 8)


# After the charge ----------------------------------------------------------------------------


def send_label_counts(agent: Any, message: Sent, ctx: Any) -> Sent:
    return Sent(F=torch.ones(2), counts=agent.labelled.y.bincount())


def set_weight(agent: Any, message: Sent, ctx: Any) -> Sent:
    ctx.weight = float(len(agent.labelled))
    return Sent(F=torch.ones(2))


def decline(agent: Any, message: Sent, ctx: Any) -> Declined:
    return Declined("knows enough")


def send_if_many(agent: Any, message: Sent, ctx: Any) -> Sent:
    return Sent(F=torch.ones(2) if int(agent.labelled.y.sum()) > 2 else None)


def acknowledge(agent: Any, message: Sent, ctx: Any) -> Ack:
    return Ack()


def log_metric(agent: Any, message: Sent, ctx: Any) -> Sent:
    ctx.metrics["loss"] = 0.5  # bypasses ``ctx.log_metric``
    return Sent(F=torch.ones(2))


def store_gradient(agent: Any, message: Sent, ctx: Any) -> Sent:
    agent.memory = {"gradient": agent.labelled.x.mean(dim=0)}
    return Sent(F=torch.ones(2))


@pytest.mark.parametrize(
    ("inside", "why"),
    [
        (send_label_counts, "it sends F, counts"),
        (set_weight, "its weight is not 1"),
        (decline, "it declines"),
        (send_if_many, "it sends no F"),
        (acknowledge, "it sends no F"),
        (log_metric, "it logs loss"),
        (store_gradient, "it changes its memory"),
    ],
)
def test_a_visit_that_releases_more_than_its_plan_names_is_refused_and_stays_charged(
    engine: LocalEngine, tmp_path: Path, inside: Visit, why: str
) -> None:
    with pytest.raises(PrivacyError, match=f"step of m0 read rows with an account, and {why}"):
        run_step(engine, charged(inside))
    assert charge_count(tmp_path) == 1
    assert list(engine.memories()["m0"]) == ["old"]


def test_a_visit_with_another_charge_or_a_second_charge_is_refused(engine: LocalEngine) -> None:
    def charge_less(agent: Any, message: Sent, ctx: Any) -> Sent:
        event = PoissonSampledGaussianEvent(4.0, 0.5, 1)
        with agent.account.spend(event, ctx.charge_id), mechanism_reads():
            return release_f(agent, message, ctx)

    def charge_twice(agent: Any, message: Sent, ctx: Any) -> Sent:
        with agent.account.spend(EVENT, ctx.charge_id + "a"):
            pass
        return cast(Sent, charged(release_f)(agent, message, ctx))

    for step in (charge_less, charge_twice):
        with pytest.raises(PrivacyError, match="its charge is not the planned one"):
            run_step(engine, step)


def test_labelled_rows_kept_by_a_step_cannot_be_read_after_its_visit(engine: LocalEngine) -> None:
    kept: list[Any] = []

    def keep_rows(agent: Any, message: Sent, ctx: Any) -> Sent:
        kept.append(agent.labelled)
        assert len(kept[0]) == 4
        return Sent(F=torch.ones(2))

    run_step(engine, charged(keep_rows))
    for look in (len, lambda rows: rows.x, lambda rows: rows.y, lambda rows: rows.ids):
        with pytest.raises(PrivacyError, match="after the step"):
            look(kept[0])


@pytest.mark.parametrize(("largest", "fails"), [(0, True), (1, False)])
def test_a_step_that_continues_after_an_error_on_its_rows_is_refused(
    engine: LocalEngine, largest: int, fails: bool
) -> None:
    # Which of several releases is sent would show whether a row raises an error.
    def continues(agent: Any, message: Sent, ctx: Any) -> Sent:
        with contextlib.suppress(PrivacyError), errors_without_rows("a cluster"):
            [0][int(agent.labelled.y.max()) - largest]
        return Sent(F=torch.ones(2))

    refused = pytest.raises(PrivacyError, match="a private mechanism failed in it")
    with refused if fails else contextlib.nullcontext():
        assert run_step(engine, charged(continues)).payload.F.tolist() == [1, 1]


def test_rows_are_closed_to_a_step_that_ignores_a_failed_charge(
    engine: LocalEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def ignores(agent: Any, message: Sent, ctx: Any) -> Sent:
        with contextlib.suppress(LedgerError):
            return cast(Sent, charged(release_f)(agent, message, ctx))
        begin_release()
        record_release(MECHANISM, "F", torch.ones(2))
        with mechanism_reads():
            return release_f(agent, message, ctx)

    monkeypatch.setattr(os, "write", full_disk)
    with pytest.raises(PrivacyError, match="before their account was charged"):
        run_step(engine, ignores)
    assert charge_count(tmp_path) == 0


def test_an_error_of_a_charged_step_from_outside_shows_no_row(engine: LocalEngine) -> None:
    def fails(agent: Any, message: Sent, ctx: Any) -> Sent:
        raise ValueError(f"labels {agent.labelled.y.tolist()}")

    with pytest.raises(PrivacyError, match="fails on labelled rows: ValueError in fails") as error:
        run_step(engine, charged(fails))
    assert "[0, 1, 1, 0]" not in "".join(traceback.format_exception(error.value))
    engine._agents["m0"].account = None  # the control: without an account errors have their text
    with pytest.raises(ValueError, match=r"labels \[0, 1, 1, 0\]"):
        run_step(engine, fails)


# Reading rows ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "look",
    [lambda rows: rows.y.bincount(), lambda rows: rows.x.mean(dim=0)],
    ids=["the share of a class", "the mean of all rows"],
)
def test_under_dp_sgd_only_private_training_may_read_rows(
    engine: LocalEngine, look: Callable[[Any], Any]
) -> None:
    def read_rows(agent: Any, message: Sent, ctx: Any) -> Sent:
        with agent.account.spend(EVENT, ctx.charge_id):
            assert len(agent.labelled) == 4  # a public number
            look(agent.labelled)
            return Sent(F=torch.ones(2))

    with pytest.raises(PrivacyError, match="read outside of private training"):
        run_step(engine, read_rows)


@pytest.mark.parametrize("counts", ["private", "public"])
@pytest.mark.parametrize("look", [len, lambda rows: rows.ids], ids=["number", "ids"])
def test_only_private_training_may_read_a_private_row_count(
    counts: Any, look: Callable[[Any], Any], tmp_path: Path
) -> None:
    # In a loss or a rate, one more row would change the gradients of all others.
    hidden = counts == "private"
    plan = dataclasses.replace(
        PLAN, record_counts=counts, n_public=None if hidden else 4,
        adjacency="add_remove" if hidden else "zero_out",
    )  # fmt: skip
    account = Account.open(tmp_path / "m0.jsonl", plan, resume=False)
    engine = LocalEngine(
        [Agent(id="m0", held_labelled=LABELLED, account=account)], seed=0,
        device=torch.device("cpu"),
    )  # fmt: skip

    def divides_by_their_number(agent: Any, message: Sent, ctx: Any) -> Sent:
        with agent.account.spend(EVENT, ctx.charge_id):
            begin_release()
            record_release(MECHANISM, "F", torch.ones(2))
            look(agent.labelled)
            return Sent(F=torch.ones(2))

    with contextlib.closing(engine):
        if hidden:
            with pytest.raises(PrivacyError, match="the number of labelled rows is private"):
                run_step(engine, divides_by_their_number)
        else:
            run_step(engine, divides_by_their_number)
        assert len(LABELLED) == 4


# Sending results ------------------------------------------------------------------------------


def send_mean_without_noise(agent: Any, message: Sent, ctx: Any) -> Sent:
    return Sent(F=agent.labelled.x.mean(dim=(0, 1))[0, :2])


def change_after_noise(agent: Any, message: Sent, ctx: Any) -> Sent:
    return Sent(F=torch.ones(2) + 1e-7 * agent.labelled.y.sum())


def use_rows_twice(agent: Any, message: Sent, ctx: Any) -> Sent:
    begin_release()  # as every mechanism does for every network
    return Sent(F=torch.ones(2))


def send_extra_tensor(agent: Any, message: Sent, ctx: Any) -> Weights:
    return Weights(F={"": torch.ones(2), "bias": agent.labelled.y.float()})


@pytest.mark.parametrize(
    ("inside", "why"),
    [
        (send_mean_without_noise, "no private mechanism made its F"),
        (change_after_noise, "no private mechanism made its F"),
        (send_extra_tensor, "no private mechanism made its F"),
        (use_rows_twice, "a private mechanism uses rows twice in one step"),
    ],
)
def test_a_charged_step_may_send_only_the_bits_that_a_private_mechanism_made(
    engine: LocalEngine, tmp_path: Path, inside: Visit, why: str
) -> None:
    with pytest.raises(PrivacyError, match=why):
        run_step(engine, charged(inside))
    assert charge_count(tmp_path) == 1


def test_a_mechanism_with_another_event_than_the_charged_one_is_refused(
    engine: LocalEngine,
) -> None:
    def record_longer_event(agent: Any, message: Sent, ctx: Any) -> Sent:
        with agent.account.spend(EVENT, ctx.charge_id):
            record_release(Mechanism(PoissonSampledGaussianEvent(4.0, 0.5, 11)), "F", torch.ones(2))
            return Sent(F=torch.ones(2))

    with pytest.raises(PrivacyError, match="no private mechanism made its F"):
        run_step(engine, record_longer_event)


def test_diverged_weights_count_as_the_bits_that_the_mechanism_made(engine: LocalEngine) -> None:
    lost = {"w": torch.tensor([float("nan"), float("inf")]), "b": torch.tensor(-0.0)}

    def send_diverged(agent: Any, message: Sent, ctx: Any) -> Weights:
        with agent.account.spend(EVENT, ctx.charge_id):
            record_release(MECHANISM, "F", lost)
            return Weights(F={name: tensor.clone() for name, tensor in lost.items()})

    with pytest.raises(
        MessageError, match="not finite"
    ):  # raised by the engine: the check of the release passed
        run_step(engine, send_diverged)


@pytest.mark.parametrize("step", [send_label_counts, set_weight, log_metric, store_gradient])
def test_without_an_account_a_step_may_send_and_store_anything(
    engine: LocalEngine, step: Visit
) -> None:
    engine._agents["m0"].account = None
    assert run_step(engine, step).payload.F.tolist() == [1, 1]


# Memory --------------------------------------------------------------------------------------


def set_memory_item(agent: Any, message: Sent, ctx: Any) -> Sent:
    agent.memory["new"] = torch.ones(2)
    return Sent()


def write_into_memory_tensor(agent: Any, message: Sent, ctx: Any) -> Sent:
    agent.memory["old"].add_(1)
    return Sent()


def test_a_step_cannot_write_into_its_memory_in_place(engine: LocalEngine) -> None:
    with pytest.raises(TypeError, match="does not support item assignment"):
        run_step(engine, set_memory_item)
    with pytest.raises(RuntimeError, match=r"write_into_memory_tensor of m0 wrote .* \(old\)"):
        run_step(engine, write_into_memory_tensor)


def test_a_new_memory_is_stored_unless_the_step_fails(engine: LocalEngine) -> None:
    def set_memory(agent: Any, message: Sent, ctx: Any) -> Sent:
        agent.memory = {**agent.memory, "new": agent.memory["old"] + 1}
        if ctx.round > 1:
            raise ValueError("broke off")
        return Sent()

    run_step(engine, set_memory)
    assert {name: t.tolist() for name, t in engine.memories()["m0"].items()} == {
        "old": [0, 0], "new": [1, 1],
    }  # fmt: skip
    before = engine.memories()["m0"]
    with pytest.raises(ValueError, match="broke off"):
        list(engine.deliver([Call(engine.roster()[0], set_memory, Sent(), 2)]))
    assert engine.memories()["m0"] is before


def test_a_memory_value_that_is_no_tensor_is_refused(engine: LocalEngine) -> None:
    def counts_rounds(agent: Any, message: Sent, ctx: Any) -> Sent:
        agent.memory = {**agent.memory, "rounds": 3}
        return Sent()

    with pytest.raises(TypeError, match=r"of m0: agent\.memory has rounds, which is no tensor"):
        run_step(engine, counts_rounds)


def test_the_error_names_a_step_that_returns_no_message(engine: LocalEngine) -> None:
    with pytest.raises(TypeError, match="return_none of m0 returned NoneType"):

        def return_none(agent: Any, message: Sent, ctx: Any) -> None:
            return None

        run_step(engine, return_none)
