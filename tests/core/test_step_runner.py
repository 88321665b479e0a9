"""What a step may touch and let go of: the mistakes that the author of a step can make honestly."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from accounting.account_plan import AccountPlan
from accounting.budget import Budget
from accounting.events import PoissonSampledGaussianEvent
from accounting.ledger import Account, read_journal
from privssl.core.agents import Agent, LabelledRows, UnlabelledRows
from privssl.core.engine import Call
from privssl.core.messages import Declined, Message, MessageError, StateDict
from privssl.core.private_release import begin_release, mechanism_reads, record_release
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
def there(tmp_path: Path) -> Iterator[LocalEngine]:
    """One agent with rows of both kinds, and an account of the labelled ones."""
    account = Account.open(tmp_path / "m0.jsonl", PLAN, resume=False)
    agent = Agent(id="m0", held_labelled=LABELLED, held_unlabelled=UNLABELLED, account=account)
    agent.memory = {"old": torch.zeros(2)}
    engine = LocalEngine([agent], seed=0, device=torch.device("cpu"))
    yield engine
    engine.close()


def ask(there: LocalEngine, step: Visit) -> Any:
    [reply] = there.deliver([Call(there.roster()[0], step, Sent(), 1)])
    return reply


def paying(inside: Visit) -> Visit:
    """The step that pays, and then does what is inside."""

    def step(agent: Any, message: Sent, ctx: Any) -> Any:
        with agent.account.spend(EVENT, ctx.charge_id):
            begin_release()
            record_release(MECHANISM, "F", torch.ones(2))
            with mechanism_reads():
                return inside(agent, message, ctx)

    return step


def as_it_should_be(agent: Any, message: Sent, ctx: Any) -> Sent:
    assert len(agent.labelled) == 4 and agent.labelled.y.tolist() == [0, 1, 1, 0]
    ctx.log_metric("loss", 1.0)  # dropped: there is an account
    return Sent(F=torch.ones(2))


def charges(tmp_path: Path) -> int:
    return len(read_journal(tmp_path / "m0.jsonl").visits)


def test_a_step_that_pays_and_sends_what_the_plan_names_is_done(
    there: LocalEngine, tmp_path: Path
) -> None:
    reply = ask(there, paying(as_it_should_be))
    assert reply.payload.F.tolist() == [1, 1] and (reply.weight, reply.metrics) == (1.0, {})
    assert charges(tmp_path) == 1


# Before it has paid --------------------------------------------------------------------------


def trains_plainly(agent: Any, message: Sent, ctx: Any) -> Sent:
    return Sent(F=agent.labelled.x.mean(dim=0))


def counts_them(agent: Any, message: Sent, ctx: Any) -> Sent:
    ctx.weight = float(len(agent.labelled))
    return Sent(F=torch.ones(2))


def looks_whether_it_is_worth_it(agent: Any, message: Sent, ctx: Any) -> Any:
    if agent.labelled.y.float().mean() > 0.9:
        return Declined("knows enough")
    return paying(as_it_should_be)(agent, message, ctx)


def learns_from_both(agent: Any, message: Sent, ctx: Any) -> Sent:
    """A query pass that takes the labelled rows as well: what semi-supervised methods do."""
    return Sent(F=torch.cat([agent.unlabelled.x, agent.labelled.x]).mean(dim=0))


@pytest.mark.parametrize(
    "step", [trains_plainly, counts_them, looks_whether_it_is_worth_it, learns_from_both]
)
def test_a_step_that_has_not_paid_finds_no_labelled_row(
    there: LocalEngine, tmp_path: Path, step: Visit
) -> None:
    with pytest.raises(PrivacyError, match="before their account was charged"):
        ask(there, step)
    assert charges(tmp_path) == 0


def test_a_visit_does_not_read_what_an_earlier_one_has_paid_for(there: LocalEngine) -> None:
    ask(there, paying(as_it_should_be))
    with pytest.raises(PrivacyError, match="before their account was charged"):
        ask(there, trains_plainly)


def test_without_an_account_rows_are_read_as_they_are(there: LocalEngine) -> None:
    there._agents["m0"].account = None
    assert ask(there, counts_them).weight == 4.0
    assert ask(there, learns_from_both).payload.F.shape == (1, 8, 8)


# After it has paid ---------------------------------------------------------------------------


def sends_counts(agent: Any, message: Sent, ctx: Any) -> Sent:
    return Sent(F=torch.ones(2), counts=agent.labelled.y.bincount())


def weighs(agent: Any, message: Sent, ctx: Any) -> Sent:
    ctx.weight = float(len(agent.labelled))
    return Sent(F=torch.ones(2))


def is_silent(agent: Any, message: Sent, ctx: Any) -> Declined:
    return Declined("knows enough")


def notes(agent: Any, message: Sent, ctx: Any) -> Sent:
    ctx.metrics["loss"] = 0.5  # past ``ctx.note``
    return Sent(F=torch.ones(2))


def keeps_for_later(agent: Any, message: Sent, ctx: Any) -> Sent:
    agent.memory = {"gradient": agent.labelled.x.mean(dim=0)}
    return Sent(F=torch.ones(2))


@pytest.mark.parametrize(
    ("inside", "why"),
    [
        (sends_counts, "it sends F, counts"),
        (weighs, "its weight is not 1"),
        (is_silent, "it declines"),
        (notes, "it logs loss"),
        (keeps_for_later, "it changes its memory"),
    ],
)
def test_a_visit_that_lets_go_of_more_than_its_plan_names_is_refused_and_stays_charged(
    there: LocalEngine, tmp_path: Path, inside: Visit, why: str
) -> None:
    with pytest.raises(PrivacyError, match=f"step of m0 read rows with an account, and {why}"):
        ask(there, paying(inside))
    assert charges(tmp_path) == 1
    assert list(there.memories()["m0"]) == ["old"]


def test_a_visit_is_charged_once_and_as_planned(there: LocalEngine) -> None:
    def cheaply(agent: Any, message: Sent, ctx: Any) -> Sent:
        event = PoissonSampledGaussianEvent(4.0, 0.5, 1)
        with agent.account.spend(event, ctx.charge_id), mechanism_reads():
            return as_it_should_be(agent, message, ctx)

    def twice(agent: Any, message: Sent, ctx: Any) -> Sent:
        with agent.account.spend(EVENT, ctx.charge_id + "a"):
            pass
        return cast(Sent, paying(as_it_should_be)(agent, message, ctx))

    for step in (cheaply, twice):
        with pytest.raises(PrivacyError, match="its charge is not the planned one"):
            ask(there, step)


def test_rows_that_were_kept_are_out_of_reach_when_their_visit_is_over(there: LocalEngine) -> None:
    kept: list[Any] = []

    def keeps_them(agent: Any, message: Sent, ctx: Any) -> Sent:
        kept.append(agent.labelled)
        assert len(kept[0]) == 4
        return Sent(F=torch.ones(2))

    ask(there, paying(keeps_them))
    for look in (len, lambda rows: rows.x, lambda rows: rows.y, lambda rows: rows.ids):
        with pytest.raises(PrivacyError, match="after the step"):
            look(kept[0])


# What it reads of them ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "look",
    [lambda rows: rows.y.bincount(), lambda rows: rows.x.mean(dim=0)],
    ids=["the share of a class", "the mean of all rows"],
)
def test_under_dp_sgd_private_training_alone_reads_rows(
    there: LocalEngine, look: Callable[[Any], Any]
) -> None:
    def balances(agent: Any, message: Sent, ctx: Any) -> Sent:
        with agent.account.spend(EVENT, ctx.charge_id):
            assert len(agent.labelled) == 4  # a public number
            look(agent.labelled)
            return Sent(F=torch.ones(2))

    with pytest.raises(PrivacyError, match="read outside of private training"):
        ask(there, balances)


@pytest.mark.parametrize("counts", ["private", "public"])
@pytest.mark.parametrize("look", [len, lambda rows: rows.ids], ids=["number", "ids"])
def test_a_private_number_of_rows_is_read_by_private_training_alone(
    counts: Any, look: Callable[[Any], Any], tmp_path: Path
) -> None:
    # In a loss or a rate, one row more would move the gradients of all others.
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
                ask(engine, divides_by_their_number)
        else:
            ask(engine, divides_by_their_number)
        assert len(LABELLED) == 4


# What it sends of them ------------------------------------------------------------------------


def trains_without_noise(agent: Any, message: Sent, ctx: Any) -> Sent:
    return Sent(F=agent.labelled.x.mean(dim=(0, 1))[0, :2])


def trains_on_after_the_noise(agent: Any, message: Sent, ctx: Any) -> Sent:
    return Sent(F=torch.ones(2) + 1e-7 * agent.labelled.y.sum())


def uses_rows_again(agent: Any, message: Sent, ctx: Any) -> Sent:
    begin_release()  # as every mechanism does, for whatever network
    return Sent(F=torch.ones(2))


def sends_more_than_was_made(agent: Any, message: Sent, ctx: Any) -> Weights:
    return Weights(F={"": torch.ones(2), "bias": agent.labelled.y.float()})


@pytest.mark.parametrize(
    ("inside", "why"),
    [
        (trains_without_noise, "no private mechanism made its F"),
        (trains_on_after_the_noise, "no private mechanism made its F"),
        (sends_more_than_was_made, "no private mechanism made its F"),
        (uses_rows_again, "a private mechanism uses rows twice in one step"),
    ],
)
def test_a_charged_step_sends_the_bits_that_a_private_mechanism_made(
    there: LocalEngine, tmp_path: Path, inside: Visit, why: str
) -> None:
    with pytest.raises(PrivacyError, match=why):
        ask(there, paying(inside))
    assert charges(tmp_path) == 1


def test_a_mechanism_that_did_something_else_than_was_charged_is_refused(
    there: LocalEngine,
) -> None:
    def longer(agent: Any, message: Sent, ctx: Any) -> Sent:
        with agent.account.spend(EVENT, ctx.charge_id):
            record_release(Mechanism(PoissonSampledGaussianEvent(4.0, 0.5, 11)), "F", torch.ones(2))
            return Sent(F=torch.ones(2))

    with pytest.raises(PrivacyError, match="no private mechanism made its F"):
        ask(there, longer)


def test_weights_that_diverged_are_the_bits_that_were_made(there: LocalEngine) -> None:
    lost = {"w": torch.tensor([float("nan"), float("inf")]), "b": torch.tensor(-0.0)}

    def diverges(agent: Any, message: Sent, ctx: Any) -> Weights:
        with agent.account.spend(EVENT, ctx.charge_id):
            record_release(MECHANISM, "F", lost)
            return Weights(F={name: tensor.clone() for name, tensor in lost.items()})

    with pytest.raises(MessageError, match="not finite"):  # of the engine: the step itself passed
        ask(there, diverges)


@pytest.mark.parametrize("step", [sends_counts, weighs, notes, keeps_for_later])
def test_without_an_account_all_of_it_may_leave(there: LocalEngine, step: Visit) -> None:
    there._agents["m0"].account = None
    assert ask(there, step).payload.F.tolist() == [1, 1]


# What it remembers ---------------------------------------------------------------------------


def sets_an_item(agent: Any, message: Sent, ctx: Any) -> Sent:
    agent.memory["new"] = torch.ones(2)
    return Sent()


def writes_into_a_tensor(agent: Any, message: Sent, ctx: Any) -> Sent:
    agent.memory["old"].add_(1)
    return Sent()


def test_what_is_remembered_is_replaced_and_never_written_into(there: LocalEngine) -> None:
    with pytest.raises(TypeError, match="does not support item assignment"):
        ask(there, sets_an_item)
    with pytest.raises(RuntimeError, match=r"writes_into_a_tensor of m0 wrote .* \(old\)"):
        ask(there, writes_into_a_tensor)


def test_a_new_mapping_is_remembered_and_none_is_when_a_step_breaks_off(there: LocalEngine) -> None:
    def remembers(agent: Any, message: Sent, ctx: Any) -> Sent:
        agent.memory = {**agent.memory, "new": agent.memory["old"] + 1}
        if ctx.round > 1:
            raise ValueError("broke off")
        return Sent()

    ask(there, remembers)
    assert {name: t.tolist() for name, t in there.memories()["m0"].items()} == {
        "old": [0, 0], "new": [1, 1],
    }  # fmt: skip
    before = there.memories()["m0"]
    with pytest.raises(ValueError, match="broke off"):
        list(there.deliver([Call(there.roster()[0], remembers, Sent(), 2)]))
    assert there.memories()["m0"] is before


def test_something_else_than_tensors_cannot_be_remembered(there: LocalEngine) -> None:
    def counts_rounds(agent: Any, message: Sent, ctx: Any) -> Sent:
        agent.memory = {**agent.memory, "rounds": 3}
        return Sent()

    with pytest.raises(TypeError, match=r"of m0: agent\.memory has rounds, which is no tensor"):
        ask(there, counts_rounds)


def test_a_step_that_returns_no_message_is_named(there: LocalEngine) -> None:
    with pytest.raises(TypeError, match="forgetful of m0 returned NoneType"):

        def forgetful(agent: Any, message: Sent, ctx: Any) -> None:
            return None

        ask(there, forgetful)
