"""FedAvg and FedProx where server and agents hold labels: FedMatch's upper bound."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from privssl.core.aggregation import WeightedMean
from privssl.data import FederatedDataset
from privssl.errors import ConfigError, UserError
from privssl.experiment.config import load_config
from privssl.experiment.prepare import prepare
from tests.support.toy_worlds import (
    RecordingEngine,
    at_server,
    federated_data,
    make,
    same_bits,
    simulate,
)

CONFIGS = Path(__file__).parents[2] / "configs"
#: No randomness after the initial weights: rows as they are, in one batch.
PLAIN: dict[str, Any] = {"weak": "none", "batch_size": 100, "local_epochs": 2}
BOTH = ["data.labels=labels-at-both", "agents.mixed=0", "agents.support=2", "data.labelled=100"]


def at_both(labelled: int = 50, **data: Any) -> FederatedDataset:
    """20 rows at the server, the others at two agents."""
    data = {"server_labelled": 20, "labelled": labelled, "unlabelled": None} | data
    return federated_data(labels="labels-at-both", query=0, **data)


def test_the_server_holds_its_number_of_rows_of_all_classes_and_agents_the_others() -> None:
    found = at_both(partition="classes_per_agent", k=5)
    held = {agent: rows.labelled for agent, rows in found.manifest.agents.items()}
    assert list(held) == ["server", "s0", "s1"] and len(held["server"]) == 20
    everywhere = [row for rows in held.values() for row in rows]
    assert len(set(everywhere)) == len(everywhere) == 50
    classes = {agent: found.true_labels[list(rows)] for agent, rows in held.items()}
    # the partition rule applies to agents
    assert torch.bincount(classes["server"]).tolist() == [2] * 10
    assert int((torch.bincount(classes["s0"]) > 0).sum()) == 5
    # Which rows have labels does not change.
    elsewhere = federated_data(labelled=50, query=0, unlabelled=None).manifest.agents.values()
    assert sorted(everywhere) == sorted(row for rows in elsewhere for row in rows.labelled)


@pytest.mark.parametrize(("name", "mu"), [("fedavg", 0.0), ("fedprox", 0.01)])
def test_the_server_trains_first_and_agents_start_from_its_weights(name: str, mu: float) -> None:
    parties = at_both()
    after = simulate(make(name, **PLAIN), parties, 1, engine=RecordingEngine)
    assert isinstance(after.engine, RecordingEngine)
    (first, server), *others = after.engine.recorded
    assert (first.to.id, first.message.proximal) == ("server", 0.0)
    assert same_bits(first.message.F, after.begun.F)
    mean = WeightedMean("F")
    for call, reply in others:
        assert same_bits(call.message.F, server.payload.F)
        assert call.message.proximal == mu
        mean.consume(reply)
    assert [call.to.id for call, _ in others] == ["s0", "s1"]
    assert same_bits(after.classifier, mean.value_or({}))
    # The server trains like Server-SL on these rows.
    alone = at_server(labelled=20, query=1, unlabelled=10)
    rows = {agent.id: agent for agent in parties.agents}["server"].held_labelled
    for agent in alone.agents:
        if agent.id == "server":
            agent.held_labelled = rows
    expected = simulate(make("server_sl", **PLAIN), alone, 1).classifier
    assert_close(server.payload.F, expected)  # rows come in another order
    # The control: if only agents have labels they start from the initial weights.
    plain = simulate(
        make(name, **PLAIN), federated_data(query=0, unlabelled=None), 1, engine=RecordingEngine
    )
    assert isinstance(plain.engine, RecordingEngine)
    assert same_bits(plain.engine.recorded[0][0].message.F, plain.begun.F)


def test_agents_are_sampled_and_see_slices_and_the_server_always_takes_part_with_all_rows() -> None:
    algorithm = make("fedavg", **PLAIN, agents_per_round=1, stream_slices=3)
    after = simulate(algorithm, at_both(), 3, engine=RecordingEngine)
    assert isinstance(after.engine, RecordingEngine)
    asked = [(call.to.id, call.step.__name__) for call, _ in after.engine.recorded]
    assert asked[::2] == [("server", "server_pass")] * 3
    assert {agent for agent, _ in asked[1::2]} <= {"s0", "s1"} and len(asked) == 6
    weights = [reply.weight for call, reply in after.engine.recorded if call.to.id != "server"]
    assert weights == [5.0] * 3  # a third of 15 rows


@pytest.mark.parametrize(("config", "settings", "said"), [
    ("fedavg", [], "server_labelled"),
    ("fedavg", ["data.server_labelled=100"], "100: give less than data.labelled, 100"),
    ("fedavg", ["data.server_labelled=20", "agents.query=2"], "Set agents.query to 0"),
    ("fedavg", ["data.server_labelled=20", "agents.support=0"], "agents.support is 0"),
    ("fedavg", ["data.server_labelled=20", "data.labels=support"], "belongs to labels-at-both"),
    ("fedavg", ["data.server_labelled=20", "algorithm.aggregation=none"], "server's weights"),
    ("feddyn", ["data.server_labelled=20"], "Set algorithm.name: fedavg or fedprox"),
    ("fedavg_dp", ["data.server_labelled=20", "agents.query=0"], "server would hold labelled rows"),
])  # fmt: skip
def test_invalid_settings_are_refused(config: str, settings: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        given = dict(setting.split("=") for setting in (*BOTH, *settings))  # the last value counts
        load_config(CONFIGS / f"{config}.yaml", [f"{k}={v}" for k, v in given.items()])
    assert said in " ".join(str(caught.value).split())


def test_labels_at_both_places_are_refused_over_sites() -> None:
    settings = [*BOTH, "data.server_labelled=20", "run.engine=flower"]
    with pytest.raises(UserError, match=r"labels-at-both has no meaning with run\.engine flower"):
        prepare(load_config(CONFIGS / "fedavg.yaml", settings))
