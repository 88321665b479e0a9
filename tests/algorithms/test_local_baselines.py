"""Local-SL, Local-UDA and Local-FixMatch: no aggregation, and the streams of FedMatch's Table 2."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from privssl.algorithms.baselines.supervised import ProximalRequest
from privssl.core.messages import StateDict
from privssl.errors import ConfigError
from privssl.experiment.config import config_hash, load_config
from privssl.experiment.prepare import prepare
from privssl.training import local_training
from privssl.training.evaluation import MOST_AGENTS, Evaluator
from tests.support.fedmatch import RecordingMeter, context
from tests.support.toy_worlds import (
    RecordingEngine,
    at_clients,
    federated_data,
    make,
    same_bits,
    simulate,
)

PLAIN: dict[str, Any] = {"local_epochs": 1, "aggregation": "none"}
CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "fixmatch", "uda"])
def test_without_aggregation_an_agent_continues_from_its_own_network(name: str) -> None:
    parties = federated_data(labelled=20) if name in ("fedavg", "fedprox") else at_clients()
    after = simulate(make(name, **PLAIN), parties, 2, engine=RecordingEngine)
    assert isinstance(after.engine, RecordingEngine)
    half = len(after.engine.recorded) // 2
    before = {call.to.id: reply.payload.F for call, reply in after.engine.recorded[:half]}
    for call, reply in after.engine.recorded[half:]:
        assert same_bits(call.message.F, before[call.to.id])
        assert call.message.proximal == 0.0  # there is no proximal term
        assert same_bits(after.algorithm.own_classifiers(after.state)[call.to.id], reply.payload.F)
    first, second = before.values()
    assert not same_bits(first, second)
    assert same_bits(
        after.classifier, next(iter(after.algorithm.own_classifiers(after.state).values()))
    )
    # The control: with aggregation all continue from one network, and no agent has its own.
    mean = simulate(make(name, local_epochs=1), parties, 2, engine=RecordingEngine)
    assert isinstance(mean.engine, RecordingEngine)
    sent = [call.message.F for call, _ in mean.engine.recorded[half:]]
    assert same_bits(*sent) and not mean.algorithm.own_classifiers(mean.state)
    counted = [reply.weight != 1.0 for _, reply in mean.engine.recorded]
    assert all(counted) == (name != "fedprox")  # weighted by rows, except for FedProx's default
    # no aggregation: no row count leaves an agent
    assert all(reply.weight == 1.0 for _, reply in after.engine.recorded)


@pytest.mark.parametrize("name", ["fixmatch", "fedavg"])
def test_a_stream_shows_every_row_once(name: str) -> None:
    parties = at_clients(unlabelled=30) if name == "fixmatch" else federated_data(labelled=20)
    seen: list[list[int]] = []
    for number in (1, 2, 3, 4):
        agent = parties.agents[0]
        meter, ctx = RecordingMeter(), context(number)
        ctx.meter = meter
        algorithm = make(name, local_epochs=1, rounds=4, stream_slices=2)
        F = {n: w.clone() for n, w in algorithm.task.new_classifier().state_dict().items()}
        if name == "fixmatch":
            cast(Any, algorithm).mixed_pass(agent, ProximalRequest(F), ctx)
            seen.append(sorted(meter.ids))
        else:
            cast(Any, algorithm).labelled_pass(agent, ProximalRequest(F), ctx)
            seen.append([round(ctx.weight)])
    if name == "fedavg":
        assert seen == [[5]] * 4  # half of ten rows
        return
    held = parties.agents[0].unlabelled.ids.tolist()
    assert seen[0] == seen[1] and seen[2] == seen[3]
    assert (seen[0], seen[2]) == (sorted(held[:8]), sorted(held[8:]))  # as stored


@pytest.mark.parametrize("name", ["fixmatch", "uda"])
def test_accuracy_on_labelled_rows_is_measured_after_each_step(name: str) -> None:
    agent, ctx, quiet = at_clients().agents[0], context(), context()
    once: dict[str, Any] = {"local_epochs": 1, "batch_size": 100}  # one step
    algorithm = cast(Any, make(name, measure_labelled=True, **once))
    F = {n: w.clone() for n, w in algorithm.task.new_classifier().state_dict().items()}
    reply = algorithm.mixed_pass(agent, ProximalRequest(F), ctx)
    network = algorithm.task.new_classifier().eval()
    network.load_state_dict(reply.F)
    shown = network(local_training.network_input(agent.labelled.x, ctx.device))
    right = (shown.argmax(dim=1) == agent.labelled.y).float().mean().item()
    assert ctx.metrics["train/labelled_accuracy"] == pytest.approx(right)
    cast(Any, make(name, **once)).mixed_pass(agent, ProximalRequest(F), quiet)
    assert "train/labelled_accuracy" not in quiet.metrics


@pytest.mark.parametrize(("config", "settings", "key"), [
    ("fixmatch", ["algorithm.aggregation=none"], "algorithm.aggregation"),
    ("fedsem", ["algorithm.aggregation=none"], "aggregation"),
    ("fedsem", ["algorithm.stream_slices=2"], "stream_slices"),
    ("fedavg_dp", ["algorithm.aggregation=none"], "algorithm.aggregation"),
    ("fedavg_dp", ["algorithm.stream_slices=2"], "algorithm.stream_slices"),
    ("fedavg", ["algorithm.stream_slices=1000"], "stream_slices"),
    ("fedprox", ["algorithm.aggregation=none"], r"proximal\s+0.01, but with aggregation"),
    ("fedavg", ["algorithm.aggregation=none", "algorithm.weights=equal"], r"weights\s+equal, but"),
    ("feddyn", ["algorithm.aggregation=none"], "unknown key"),
    ("fedrgd", ["algorithm.stream_slices=2"], "unknown key"),
    ("fedrgd", ["algorithm.weights=rows"], "weights"),
])  # fmt: skip
def test_invalid_settings_are_refused(config: str, settings: list[str], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        load_config(CONFIGS / f"{config}.yaml", settings)


def test_a_run_that_names_a_removed_key_with_its_only_value_can_be_resumed(tmp_path: Path) -> None:
    text = (CONFIGS / "fedsem.yaml").read_text()
    former = text.replace("name: fedsem", "name: fedsem\n  aggregation: mean\n  stream_slices: 1")
    path = tmp_path / "config.yaml"
    path.write_text(former)
    with pytest.raises(ConfigError, match="unknown key"):  # no folder of a run: there is no split
        load_config(path)
    (tmp_path / "split.json").write_text("{}")
    assert config_hash(load_config(path)) == config_hash(load_config(CONFIGS / "fedsem.yaml"))
    path.write_text(former.replace("aggregation: mean", "aggregation: none"))  # the control
    with pytest.raises(ConfigError, match="aggregation"):
        load_config(path)


@pytest.mark.parametrize(("name", "said"), [("semifl", 1), ("fedmatch", 0)])
def test_asking_for_agent_accuracy_without_agent_networks_is_an_error(name: str, said: int) -> None:
    prepared = prepare(load_config(CONFIGS / f"{name}.yaml", ["run.evaluate_agents=true"]))
    warned = [text for text in prepared.warnings if "run.evaluate_agents has no effect" in text]
    assert len(warned) == said


def test_agent_accuracy_is_the_mean_over_their_own_networks() -> None:
    x, y = torch.zeros(4, 1, 1, 2), torch.tensor([0, 0, 0, 1])
    judge = Evaluator(
        nn.Sequential(nn.Flatten(), nn.Linear(2, 2)), {"test": (x, y)}, torch.device("cpu")
    )

    def predicts(choice: int) -> StateDict:
        return {"1.weight": torch.zeros(2, 2), "1.bias": torch.eye(2)[choice]}

    found = judge.of_agents({"m10": predicts(0), "m9": predicts(1)})
    assert found == {
        "test/accuracy_own": (0.75 + 0.25) / 2, "test/accuracy_own/m9": 0.25,
        "test/accuracy_own/m10": 0.75,
    }  # fmt: skip
    many = judge.of_agents({f"m{i}": predicts(0) for i in range(MOST_AGENTS + 1)})
    assert many == {"test/accuracy_own": 0.75} and judge.of_agents({}) == {}


def test_the_validation_loss_is_the_mean_cross_entropy() -> None:
    x, y = torch.zeros(4, 1, 1, 2), torch.tensor([0, 0, 0, 1])
    judge = Evaluator(
        nn.Sequential(nn.Flatten(), nn.Linear(2, 2)), {"validation": (x, y)}, torch.device("cpu")
    )
    p = torch.tensor([0.8, 0.2])
    found = judge.validation_loss({"1.weight": torch.zeros(2, 2), "1.bias": p.log()})
    assert found == pytest.approx(-(3 * p[0].log() + p[1].log()).item() / 4)
    assert judge.validation_loss({"1.weight": torch.full((2, 2), torch.nan), "1.bias": p}) is None
