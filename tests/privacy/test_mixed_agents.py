"""Mixed agents in a private run: steps on unlabelled rows do not depend on labelled rows.

Every private method runs with agents that hold both kinds of rows. Steps without a charge run a
second time at agents with other labelled rows, and must send the same bits. Negative controls are
query passes that also train on labelled rows: through the agent's fields, which ends the run, and
around the guard, which changes the answers.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from privssl.algorithms import ALGORITHMS
from privssl.core.agents import Agent, LabelledRows, UnlabelledRows
from privssl.core.engine import Call
from privssl.core.federation import Federation
from privssl.core.messages import Reply
from privssl.engines.batched import BatchedEngine
from privssl.engines.local import LocalEngine
from privssl.errors import PrivacyError
from privssl.experiment import config
from privssl.experiment.prepare import Prepared, prepare
from privssl.runs.round_plan import planned_rounds
from tests.support.algorithm_contract import NEEDS
from tests.support.private_fedssl import accounts
from tests.support.toy_worlds import same_bits

METHODS = [name for name in ALGORITHMS if ALGORITHMS[name].can_be_private]
#: Methods that send mixed agents requests without a charge.
QUERYING = [name for name in METHODS if ALGORITHMS[name].reads_unlabelled]
TINY: dict[str, dict[str, Any]] = {
    "fedssl": {
        "rounds": 2, "local_steps": 2, "batch_size": 8, "generator_width": 4,
        "warm_up": 0, "gate": 0.0,
    },
    "fedavg": {"rounds": 2},
    "label_census": NEEDS["label_census"] | {"local_steps": 2, "batch_size": 8},
}  # fmt: skip
TRAINED = "{epsilon: 50.0, noise_multiplier: 4.0, sample_rate: 0.5, steps: 2}"
COUNTED = "{epsilon: 4.0, delta: 1.0e-5}"

#: Calls that were delivered together, and their replies.
Answers = tuple[Sequence[Call], Sequence[Reply[Any]]]
sequential_and_batched = pytest.mark.parametrize("at_once", [1, 8])


def prepared(name: str, folder: Path, labels: str = "labels-at-client") -> Prepared:
    privacy = COUNTED if ALGORITHMS[name].mechanism == "census" else TRAINED
    own = ", ".join(f"{key}: {value}" for key, value in TINY[name].items())
    path = folder / "tiny.yaml"
    path.write_text(
        f"data: {{name: toy, labelled: 40, unlabelled: 60, labels: {labels}}}\n"
        "agents: {mixed: 2, query: 1}\nmodel: {name: small_cnn, width: 4}\n"
        f"algorithm: {{name: {name}, {own}}}\nprivacy: {privacy}\n"
    )
    return prepare(config.load_config(path))


def engine_of(made: Prepared, at_once: int) -> LocalEngine:
    agents, common = made.federated_data.agents, {"seed": 0, "device": torch.device("cpu")}
    if at_once == 1:
        return LocalEngine(agents, **common)  # type: ignore[arg-type]
    return BatchedEngine(agents, algorithm=made.algorithm, at_once=at_once, **common)  # type: ignore[arg-type]


def uncharged_answers(made: Prepared, folder: Path, at_once: int) -> list[Answers]:
    """Run all rounds and return the calls to agents that were not charged, in order."""
    free: list[Answers] = []
    folder.mkdir()
    with accounts(made, folder) as agents:
        engine = engine_of(made, at_once)
        deliver = engine.deliver

        def recording(calls: Sequence[Call]) -> list[Reply[Any]]:
            mixed = {a.id: a.account for a in agents.values() if a.account is not None}
            before = {name: account.visits() for name, account in mixed.items()}
            replies = list(deliver(calls))
            charged = {name for name, account in mixed.items() if account.visits() > before[name]}
            pairs = [p for p in zip(calls, replies, strict=True) if p[0].to.id not in charged]
            if pairs:  # query agents stay in the list: batched answers depend on them by rounding
                free.append(([call for call, _ in pairs], [reply for _, reply in pairs]))
            return replies

        engine.deliver = recording  # type: ignore[method-assign]
        federation = Federation(engine, 0)
        state = made.algorithm.start(federation)
        for now in planned_rounds(made.algorithm.phases()):
            federation.begin(now)
            state = made.algorithm.round(state, federation)
        engine.close()
    return free


def deliver_again(
    made: Prepared, folder: Path, at_once: int, asked: Sequence[Sequence[Call]]
) -> list[Reply[Any]]:
    folder.mkdir()
    with accounts(made, folder):
        engine = engine_of(made, at_once)
        replies = [reply for calls in asked for reply in engine.deliver(calls)]
        engine.close()
    return replies


def with_other_labelled_rows(made: Prepared) -> Prepared:
    for agent in made.federated_data.agents:
        if (rows := agent.held_labelled) is not None:
            turned = 255 - rows.x if rows.x.dtype == torch.uint8 else 1 - rows.x
            agent.held_labelled = LabelledRows(turned, rows.y.roll(1), rows.ids)
    return made


def count_differing(name: str, folder: Path, at_once: int) -> tuple[int, int]:
    """The number of uncharged answers, and how many differ with other labelled rows."""
    made = prepared(name, folder)
    free = uncharged_answers(made, folder / "a", at_once)
    other = with_other_labelled_rows(prepared(name, folder))
    other = dataclasses.replace(other, algorithm=made.algorithm)  # the calls name its steps
    again = deliver_again(other, folder / "b", at_once, [calls for calls, _ in free])
    first = [reply for _, replies in free for reply in replies]
    pairs = [p for p in zip(first, again, strict=True) if p[0].sender.role == "mixed"]
    different = [
        1
        for then, now in pairs
        if not same_bits(vars(then.content), vars(now.content))
        or (then.weight, dict(then.metrics)) != (now.weight, dict(now.metrics))
    ]
    return len(pairs), len(different)


@sequential_and_batched
@pytest.mark.parametrize("name", METHODS)
def test_uncharged_answers_do_not_depend_on_labelled_rows(
    name: str, at_once: int, tmp_path: Path
) -> None:
    answers, different = count_differing(name, tmp_path, at_once)
    assert different == 0
    assert (answers > 0) == (name in QUERYING)


def with_labelled(rows: Callable[[Any], Any]) -> property:
    """The fault: a step's unlabelled rows include the labelled ones."""

    def unlabelled(agent: Agent) -> UnlabelledRows:
        assert agent.held_unlabelled is not None
        own = agent.held_unlabelled
        if agent.held_labelled is None:
            return own
        more = rows(agent.held_labelled)
        return UnlabelledRows(torch.cat([more.x, own.x]), torch.cat([more.ids, own.ids]))

    return property(unlabelled)


@sequential_and_batched
@pytest.mark.parametrize("name", QUERYING)
def test_a_query_pass_that_trains_on_labelled_rows_ends_the_run(
    name: str, at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Agent, "unlabelled", with_labelled(lambda rows: rows))
    with pytest.raises(PrivacyError, match="before their account was charged"):
        uncharged_answers(prepared(name, tmp_path), tmp_path / "a", at_once)


@pytest.mark.fast_cases(1)
@sequential_and_batched
@pytest.mark.parametrize("name", QUERYING)
def test_a_query_pass_that_evades_the_guard_changes_its_answers(
    name: str, at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def evade(rows: Any) -> Any:
        try:
            return object.__getattribute__(rows, "_rows")
        except AttributeError:
            return rows

    monkeypatch.setattr(Agent, "unlabelled", with_labelled(evade))
    answers, different = count_differing(name, tmp_path, at_once)
    assert answers and different


@pytest.mark.parametrize("name", METHODS)
def test_labelled_rows_of_all_agents_are_disjoint_from_all_unlabelled_rows(
    name: str, tmp_path: Path
) -> None:
    agents = prepared(name, tmp_path).federated_data.agents
    under_accounts = {int(i) for a in agents if a.held_labelled for i in a.held_labelled.ids}
    assert len(under_accounts) == 40
    for agent in agents:
        if agent.held_unlabelled is not None:
            assert under_accounts.isdisjoint(agent.held_unlabelled.ids.tolist())
