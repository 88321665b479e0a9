"""Every algorithm, with labels at every place and every partition.

A pair that does not run is refused when the config is read, with a reason and advice. The page
docs/placements.md is generated from the same code; the expected refusals are listed here.
"""

import itertools
import typing
from pathlib import Path
from typing import Any

import pytest
import yaml

from privssl.algorithms import ALGORITHMS
from privssl.data import build
from privssl.data.datasets import Dataset
from privssl.data.datasets import load_dataset as load_dataset
from privssl.errors import ConfigError
from privssl.experiment.config import load_config
from privssl.settings.names import PARTITIONS
from privssl.settings.schema import AgentSettings, DataSettings

AGENTS: dict[str, dict[str, int]] = {
    "support": {"support": 2, "query": 6},
    "labels-at-server": {"query": 6},
    "labels-at-client": {"mixed": 6},
    "labels-at-both": {"support": 6},
}
NUMBERS = {"dirichlet": {"alpha": 0.5}, "dirichlet_equal": {"alpha": 0.5}}
NUMBERS |= {"classes_per_agent": {"k": 5}, "shards": {"k": 5}}
AT_SERVER = "server_sl learns at a server that holds all labels. Set "
AVERAGES = "averages agents that learn from labels, and the server alone would have any. Set "
REFUSED = {
    ("server_sl", "support"): f"data.labels support, but {AT_SERVER}",
    ("server_sl", "labels-at-client"): f"data.labels labels-at-client, but {AT_SERVER}",
    ("fedavg", "labels-at-server"): f"data.labels labels-at-server, but fedavg {AVERAGES}",
    **{
        (name, "labels-at-both"): f"data.labels labels-at-both, but {name} has no round in which"
        for name in ALGORITHMS
        if name not in ("fedavg", "fedprox")
    },
    **{
        (name, "labels-at-server"): f"data.labels labels-at-server, but {name} {AVERAGES}"
        for name in ("fedprox", "feddyn", "lg_fedavg", "heterofl")
    },
}
CAN_BE_PRIVATE = {"fedssl", "label_census", "fedavg"}


def sections(labels: str, partition: str) -> dict[str, Any]:
    """The data and agents sections of a pair."""
    data = {"name": "digits", "labelled": 300, "labels": labels, "partition": partition}
    data |= {"server_labelled": 100} if labels == "labels-at-both" else {}
    return {"data": data | NUMBERS.get(partition, {}), "agents": AGENTS[labels]}


def refusal(config: dict[str, Any], folder: Path) -> str:
    """Every problem of a config; empty when it is accepted."""
    path = folder / "cell.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    try:
        load_config(path)
    except ConfigError as error:
        return " ".join(str(error).split())
    return ""


def wrong(name: str, expected: dict[tuple[str, str], str], folder: Path) -> list[str]:
    """The placements and partitions of an algorithm that are not as expected."""
    found = []
    for labels, partition in itertools.product(AGENTS, PARTITIONS):
        text = refusal(sections(labels, partition) | {"algorithm": {"name": name}}, folder)
        reason = expected.get((name, labels), "")
        if bool(text) != bool(reason) or reason not in text:
            found.append(f"{name}, {labels}, {partition}: {reason!r} expected, got {text!r}")
    return found


@pytest.mark.parametrize("name", ALGORITHMS)
def test_each_pair_runs_or_is_refused_for_its_reason(name: str, tmp_path: Path) -> None:
    assert wrong(name, REFUSED, tmp_path) == []


def test_the_check_detects_missing_additional_and_other_refusals(tmp_path: Path) -> None:
    count = len(PARTITIONS)
    assert len(wrong("server_sl", {}, tmp_path)) == 3 * count
    fedssl = {pair: text for pair, text in REFUSED.items() if pair[0] == "fedssl"}
    assert len(wrong("fedssl", fedssl | {("fedssl", "support"): "it rains"}, tmp_path)) == count
    assert len(wrong("fedavg", {("fedavg", "labels-at-server"): "it rains"}, tmp_path)) == count


def test_placements_are_those_that_a_config_can_name() -> None:
    assert typing.get_args(typing.get_type_hints(DataSettings)["labels"]) == tuple(AGENTS)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_privacy_section_is_refused_unless_the_method_can_be_private(
    name: str, tmp_path: Path
) -> None:
    labels = "labels-at-server" if name == "server_sl" else "support"
    private = {"algorithm": {"name": name}, "privacy": {"epsilon": 8.0}}
    text = refusal(sections(labels, "iid") | private, tmp_path)
    assert ("reads labelled rows without noise" in text) == (name not in CAN_BE_PRIVATE), text


DIGITS: Dataset = load_dataset(DataSettings(name="digits"))


@pytest.mark.parametrize("labels", AGENTS)
@pytest.mark.parametrize("partition", PARTITIONS)
def test_the_split_of_each_cell_can_be_drawn_and_every_agent_has_rows(
    labels: str, partition: str
) -> None:
    asked = sections(labels, partition)
    parties = build(DataSettings(**asked["data"]), AgentSettings(**asked["agents"]), 0, DIGITS)
    holders = [agent for agent in parties.agents if agent.held_labelled is not None]
    assert sum(len(agent.labelled) for agent in holders) == 300
    assert all(
        len(agent.labelled if agent in holders else agent.unlabelled) for agent in parties.agents
    )
