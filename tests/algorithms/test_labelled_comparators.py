"""FedDyn, LG-FedAvg, HeteroFL, FedRGD and SemiFL's recipe: each line by hand."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

from privssl.algorithms.baselines import heterofl
from privssl.algorithms.baselines.feddyn import FedDyn, server_step
from privssl.algorithms.baselines.fedrgd import FedRGD, average_with_server
from privssl.algorithms.baselines.heterofl import (
    HeteroFL,
    HeteroFLConfig,
    layers_without_norm,
    masked_loss,
    merge_parameters,
    slice_parameters,
)
from privssl.algorithms.baselines.lg_fedavg import LGFedAvg, LGRequest, LGUpdate, split_layers
from privssl.algorithms.baselines.local_settings import LocalTrainingSettings
from privssl.algorithms.baselines.supervised import ProximalRequest, run_sgd
from privssl.algorithms.local_ssl import ModelUpdate
from privssl.core.agents import Agent, LabelledRows
from privssl.core.messages import Declined, MessageError
from privssl.core.task import Context, Task
from privssl.errors import ConfigError
from privssl.experiment.config import load_config
from privssl.models import build_classifier
from privssl.models.static_norm import collect, statistics_of
from privssl.runtime.randomness import seeded
from privssl.settings.schema import ModelSettings
from privssl.training.local_training import network_input
from tests.support.toy_worlds import (
    TOY,
    DecliningEngine,
    RecordingEngine,
    Simulation,
    apart,
    at_server,
    federated_data,
    make,
    same_bits,
    simulate,
)

CONFIGS = Path(__file__).parents[2] / "configs"
#: One step on all rows as they are.
PLAIN: dict[str, Any] = {
    "weak": "none", "batch_size": 100, "local_epochs": 1, "momentum": 0.0, "learning_rate": 0.1,
}  # fmt: skip


def context(round_number: int = 1) -> Context:
    return Context(0, round_number, "s0", "visit", "attempt", torch.device("cpu"))


def agent(rows: int = 20) -> Agent:
    ids = torch.arange(rows)
    return Agent(id="s0", held_labelled=LabelledRows(TOY.x_train[ids], TOY.y_train[ids], ids))


def recorded(after: Simulation, step: str) -> list[tuple[str, Any, Any]]:
    """Agent, message and payload of each call of a step."""
    assert isinstance(after.engine, RecordingEngine)
    return [
        (call.to.id, call.message, reply.payload)
        for call, reply in after.engine.recorded
        if call.step.__name__ == step
    ]


def gradient(F: nn.Module, weights: Mapping[str, Tensor], rows: LabelledRows) -> dict[str, Tensor]:
    """Of the mean cross-entropy, by plain autograd."""
    F.load_state_dict(dict(weights))
    loss = cross_entropy(F.train()(network_input(rows.x)), rows.y)
    names, parameters = zip(*F.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def mean_of(*several: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        key: torch.stack([one[key] for one in several]).float().mean(dim=0) for key in several[0]
    }


# SemiFL's recipe ----------------------------------------------------------------------------


class Line(nn.Module):
    """One weight."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0]))


def after_a_step(**settings: Any) -> float:
    """The weight 1 after a step on w^2 / 2, whose gradient is 1."""
    line, cfg = Line(), LocalTrainingSettings(learning_rate=0.1, **settings)
    losses = (line.w.square().sum() / 2 for _ in range(1))
    return float(run_sgd(line, losses, cfg, ProximalRequest(line.state_dict()), context()).F["w"])


def test_steps_may_have_nesterov_momentum_and_clipping() -> None:
    assert after_a_step(momentum=0.5) == pytest.approx(1 - 0.1)
    assert after_a_step(momentum=0.5, nesterov=True) == pytest.approx(1 - 0.1 * (1 + 0.5))
    assert after_a_step(momentum=0.0, clip_gradients=0.5) == pytest.approx(1 - 0.1 * 0.5)
    assert after_a_step(momentum=0.0, clip_gradients=2.0) == pytest.approx(1 - 0.1)
    assert after_a_step(momentum=0.0, weight_decay=0.2) == pytest.approx(1 - 0.1 * 1.2)


def test_the_rate_may_decay_along_half_a_cosine() -> None:
    cosine = LocalTrainingSettings(learning_rate=0.1, rounds=4, schedule="cosine")
    assert [cosine.rate(n) for n in (1, 2, 3)] == pytest.approx([0.1, 0.0853553, 0.05])
    assert LocalTrainingSettings(learning_rate=0.1, rounds=4).rate(3) == 0.1  # the control


def test_static_statistics_are_those_of_all_labelled_rows() -> None:
    parties = federated_data(labelled_partition="dirichlet", labelled_alpha=0.5)
    after = simulate(make("fedavg", norm="static", **PLAIN), parties, 1)
    network, expected, total = after.algorithm.task.new_classifier(), dict[str, Tensor](), 0
    for one in parties.agents:
        if one.role == "support":
            network.load_state_dict(dict(after.state.F))
            found = statistics_of(collect(network, [network_input(one.labelled.x)]))
            rows = len(one.labelled)
            total += rows
            expected = {
                k: expected.get(k, 0) + rows * v for k, v in found.items() if "running" in k
            }
    for name, value in expected.items():
        assert_close(after.state.F[name], value / total, atol=1e-5, rtol=1e-4)
        assert (after.begun.F[name] - value / total).abs().max() > 1e-3  # the control


@pytest.mark.parametrize(
    ("name", "overrides", "text"),
    [
        ("fedavg", "algorithm.schedule=cosine algorithm.learning_rate_decay=0.9", "no effect with"),
        ("fedprox", "algorithm.nesterov=true algorithm.momentum=0", "nesterov true, but momentum"),
        ("fedsem", "algorithm.nesterov=true algorithm.momentum=0", "nesterov true, but momentum"),
        ("fedavg_dp", "algorithm.nesterov=true", "no effect on private steps"),
        ("heterofl", "model.norm=none", "none, but heterofl needs static"),
        ("heterofl", "model.width=6 algorithm.levels=3", "6, which cannot be halved 2 times"),
        ("heterofl", "model.name=some:Net", "a network from outside has no width"),
        ("lg_fedavg", "algorithm.warm_up=41", "41, but there are 40 rounds"),
        ("fedrgd", "agents.query=0", "fedrgd learns from unlabelled rows"),
    ],
)
def test_invalid_settings_are_refused_when_the_config_is_read(
    name: str, overrides: str, text: str
) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(CONFIGS / f"{name}.yaml", overrides.split())
    assert text in " ".join(str(error.value).split())


# FedDyn -------------------------------------------------------------------------------------


def test_the_servers_step_goes_beyond_the_mean_by_the_accumulated_gradient() -> None:
    F, h = {"w": torch.tensor(0.0), "buffer": torch.tensor(7.0)}, {"w": torch.tensor(0.0)}
    # One of two agents sent 1: h = -0.1 * 1/2 * 1 = -0.05; theta = 1 + 0.05 / 0.1 = 1.5.
    theta, new = server_step(F, h, {"w": torch.tensor(1.0), "buffer": torch.tensor(8.0)}, 0.5, 0.1)
    assert float(new["w"]) == pytest.approx(-0.05)
    assert float(theta["w"]) == pytest.approx(1.5) and float(theta["buffer"]) == 8
    # Then both send 2: h = -0.05 - 0.1 * (2 - 1.5) = -0.1; theta = 2 + 1.
    theta, new = server_step(theta, new, {"w": torch.tensor(2.0), "buffer": F["buffer"]}, 1.0, 0.1)
    assert float(new["w"]) == pytest.approx(-0.1) and float(theta["w"]) == pytest.approx(3.0)
    assert server_step(F, h, F, 0.0, 0.1) == (F, h)


def test_an_agents_step_follows_its_accumulated_gradient_which_it_updates() -> None:
    algorithm = make("feddyn", alpha=0.5, **PLAIN)
    assert isinstance(algorithm, FedDyn)
    weights, one = dict(algorithm.task.new_classifier().state_dict()), agent()
    slope = gradient(algorithm.task.new_classifier(), weights, one.labelled)
    before = dict(weights)
    for visit in (1, 2):
        g = {k: one.memory.get(f"gradient/{k}", torch.zeros_like(v)) for k, v in slope.items()}
        sent = algorithm.labelled_pass(one, ProximalRequest(before), context(visit)).F
        # At the anchor the quadratic term has no gradient: theta - 0.1 (slope - g).
        expected = {k: before[k] - 0.1 * (slope[k] - g[k]) for k in slope}
        assert_close(dict(sent), expected, atol=1e-6, rtol=1e-4)
        for k in slope:
            renewed = g[k] - 0.5 * (sent[k] - before[k])
            assert_close(one.memory[f"gradient/{k}"], renewed, atol=1e-6, rtol=1e-4)
    # the control: without an accumulated gradient the step differs
    other = algorithm.labelled_pass(agent(), ProximalRequest(before), context(2)).F
    assert apart({"F": sent}, {"F": other}) > 1e-4


def test_a_strong_penalty_keeps_agents_at_the_received_weights() -> None:
    def moved(alpha: float) -> float:
        settings = PLAIN | {"local_epochs": 5, "learning_rate": 0.001, "alpha": alpha}
        algorithm = make("feddyn", **settings)
        assert isinstance(algorithm, FedDyn)
        with seeded(torch.Generator().manual_seed(0)):
            weights = dict(algorithm.task.new_classifier().state_dict())
        sent = algorithm.labelled_pass(agent(), ProximalRequest(weights), context()).F
        return math.sqrt(sum(float((sent[k] - v).square().sum()) for k, v in weights.items()))

    # five steps of 0.001 times a slope, against slope / 800
    assert moved(800.0) < 0.5 * moved(1e-6)


# LG-FedAvg ----------------------------------------------------------------------------------


def test_a_part_starts_with_a_weight_matrix_and_includes_its_norm() -> None:
    weights = {
        "conv.weight": torch.zeros(2, 1, 3, 3), "conv.bias": torch.zeros(2),
        "norm.weight": torch.zeros(2), "norm.bias": torch.zeros(2),
        "hidden.weight": torch.zeros(4, 2), "hidden.bias": torch.zeros(4),
        "head.weight": torch.zeros(3, 4), "head.bias": torch.zeros(3),
    }  # fmt: skip
    assert split_layers(weights, 1, "output") == {"head.weight", "head.bias"}
    assert split_layers(weights, 2, "output") == set(list(weights)[4:])
    assert split_layers(weights, 1, "input") == set(list(weights)[:4])
    with pytest.raises(ConfigError, match=r"shared_layers is 3, but the network has 3 layers"):
        split_layers(weights, 3, "output")


def test_after_the_warm_up_only_the_head_is_sent_and_averaged() -> None:
    settings = PLAIN | {"warm_up": 1, "weights": "equal"}
    after = simulate(make("lg_fedavg", **settings), federated_data(), 3, engine=RecordingEngine)
    head = {"head.weight", "head.bias"}
    kept = {who: told.F for who, told, _ in recorded(after, "keep_pass")}
    visits = recorded(after, "local_pass")
    assert [who for who, *_ in visits] == ["s0", "s1"] * 2
    for _, told, said in visits:
        assert isinstance(told, LGRequest) and isinstance(said, LGUpdate)
        assert told.shared.keys() == said.shared.keys() == head
        assert said.local is not None and not head & said.local.keys()
    first, second = [said for *_, said in visits[:2]], [said for *_, said in visits[2:]]
    # round 3 starts with the mean of the heads of round 2
    assert_close(dict(visits[2][1].shared), mean_of(*(said.shared for said in first)))
    expected = {**mean_of(*(s.local for s in second)), **mean_of(*(s.shared for s in second))}
    assert_close({k: after.state.F[k] for k in expected}, expected)
    # agents started with equal weights and drifted apart
    assert same_bits(kept["s0"], kept["s1"]) and apart(first[0].local, first[1].local) > 1e-5


def test_an_agent_continues_from_its_own_representation() -> None:
    algorithm = make("lg_fedavg", warm_up=0, **PLAIN)
    assert isinstance(algorithm, LGFedAvg)
    one, weights = agent(), dict(algorithm.task.new_classifier().state_dict())
    head = LGRequest({k: v for k, v in weights.items() if k.startswith("head")})
    assert isinstance(algorithm.local_pass(one, head, context()), Declined)  # it has none yet
    own = {k: v + 0.1 for k, v in weights.items() if not k.startswith("head")}
    one.memory = own
    slope = gradient(algorithm.task.new_classifier(), {**own, **head.shared}, one.labelled)
    said = algorithm.local_pass(one, head, context())
    assert isinstance(said, LGUpdate)
    for name, value in {**own, **head.shared}.items():
        sent = said.shared[name] if name in said.shared else one.memory[name]
        assert_close(sent, value - 0.1 * slope[name], atol=1e-6, rtol=1e-4)


def test_the_released_model_has_the_local_layers_of_the_warm_up() -> None:
    runs = [
        simulate(make("lg_fedavg", warm_up=1, send_local=sent, **PLAIN), federated_data(), rounds)
        for sent, rounds in ((True, 1), (False, 2), (True, 2))
    ]
    warm, silent, told = (dict(after.state.F) for after in runs)
    own = [name for name in warm if not name.startswith("head")]
    assert all(torch.equal(warm[name], silent[name]) for name in own)
    assert not any(torch.equal(warm[name], told[name]) for name in own if name.endswith("0.weight"))
    assert not torch.equal(warm["head.weight"], silent["head.weight"])


# HeteroFL -----------------------------------------------------------------------------------


def test_each_entry_is_the_mean_over_the_agents_that_have_it() -> None:
    F = {"w": torch.tensor([[7.0, 7.0, 7.0], [7.0, 7.0, 7.0]]), "n": torch.tensor(4)}
    narrow = {"w": torch.tensor([[1.0]]), "n": torch.tensor(4)}
    wide = {"w": torch.tensor([[4.0, 4.0], [5.0, 6.0]]), "n": torch.tensor(4)}
    assert slice_parameters(F, narrow)["w"].tolist() == [[7.0]]
    whole = merge_parameters(F, [(1, wide), (2, narrow)])
    assert whole["w"].tolist() == [[2.0, 4.0, 7.0], [5.0, 6.0, 7.0]]  # (4 + 2 * 1) / 3
    assert same_bits(merge_parameters(F, [(0, wide), (0, narrow)]), F)


def test_the_masked_loss_sets_logits_of_absent_classes_to_0() -> None:
    logits = torch.tensor([[3.0, 1.0, 5.0]]).log()
    batch = {"x": torch.zeros(1), "y": torch.tensor([0]), "held": torch.tensor([1.0, 1.0, 0.0])}
    # the third logit becomes 0: 3 / (3 + 1 + 1)
    assert float(masked_loss(batch, F=lambda _: logits)) == pytest.approx(-math.log(3 / 5))
    learned = logits.clone().requires_grad_()
    (slope,) = torch.autograd.grad(masked_loss(batch, F=lambda _: learned), [learned])
    assert_close(slope, torch.tensor([[3 / 5 - 1, 1 / 5, 0.0]]))  # none for the third
    batch["held"] = torch.ones(3)  # the control
    assert float(masked_loss(batch, F=lambda _: logits)) == pytest.approx(-math.log(3 / 9))


@pytest.mark.parametrize(("name", "layers"), [
    ("fedavg_cnn", ["head.0"]), ("lenet", ["head.0", "head.2"]), ("small_cnn", []),
    ("wresnet28x2", []), ("resnet9", []), ("resnet18", []),
])  # fmt: skip
def test_a_hidden_linear_layer_without_a_norm_is_refused_unless_there_is_one_level(
    name: str, layers: list[str]
) -> None:
    def network(share: float = 1.0) -> nn.Module:
        return build_classifier(ModelSettings(name, round(share * 4), "group"), (3, 32, 32), 10)

    assert layers_without_norm(network()) == layers
    task = Task(10, (3, 32, 32), network, "float32", network)
    HeteroFL(HeteroFLConfig(levels=1), task)
    if not layers:
        HeteroFL(HeteroFLConfig(levels=2), task)
        return
    with pytest.raises(ConfigError, match=f"no norm follows the layer {layers[0]} "):
        HeteroFL(HeteroFLConfig(levels=2), task)


def test_agents_of_a_lower_level_receive_and_send_half_of_the_channels() -> None:
    after = simulate(make("heterofl", **PLAIN), federated_data(), 1, engine=RecordingEngine)
    (first, wide, said), (second, narrow, told) = recorded(after, "level_pass")
    assert (first, second) == ("s0", "s1") and (wide.level, narrow.level) == (0, 1)
    assert said.F["trunk.0.weight"].shape[0] == 4 and told.F["trunk.0.weight"].shape[0] == 2
    assert same_bits(narrow.F, slice_parameters(after.begun.F, narrow.F))
    assert_close(
        dict(after.state.F), dict(merge_parameters(after.begun.F, [(1, said.F), (1, told.F)]))
    )
    head = after.state.F["head.weight"]  # only s0 has the last channels
    assert torch.equal(head[:, -1], said.F["head.weight"][:, -1])
    assert not torch.equal(head[:, 0], said.F["head.weight"][:, 0])


def test_one_level_without_masks_is_fedavg_with_equal_weights() -> None:
    parties = federated_data()
    fedavg = simulate(make("fedavg", norm="static", weights="equal", **PLAIN), parties).state
    plain = make("heterofl", norm="static", levels=1, masked=False, **PLAIN)
    assert apart(fedavg, simulate(plain, parties).state) < 1e-6
    parties = federated_data(labelled_partition="classes_per_agent", labelled_k=5)
    fedavg = simulate(make("fedavg", norm="static", weights="equal", **PLAIN), parties).state
    masked = simulate(make("heterofl", norm="static", levels=1, **PLAIN), parties).state
    assert apart(fedavg, masked) > 1e-4  # the control


def test_a_reply_of_another_shape_than_requested_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    algorithm = make("heterofl", **PLAIN)
    assert isinstance(algorithm, HeteroFL)
    wide = algorithm.task.new_classifier().state_dict()

    monkeypatch.setattr(heterofl, "run_sgd", lambda *_: ModelUpdate(dict(wide)))
    with pytest.raises(MessageError, match="s1 sent F in other shapes than it got"):
        simulate(algorithm, federated_data(), 1)


# FedRGD -------------------------------------------------------------------------------------


def test_a_group_is_the_mean_of_the_server_and_its_users() -> None:
    server, users = {"w": torch.tensor(0.0)}, {"w": torch.tensor(3.0)}
    assert float(average_with_server(server, users, 2)["w"]) == pytest.approx(
        2.0
    )  # (0 + 3 + 3) / 3
    assert float(average_with_server(server, users, 0)["w"]) == 0.0


@pytest.mark.parametrize("start", ["group", "average"])
def test_users_continue_from_their_group_and_the_server_from_the_mean_over_groups(
    start: str,
) -> None:
    algorithm = make("fedrgd", threshold=0.0, strong="none", start_from=start, **PLAIN)
    after = simulate(algorithm, at_server(query=3), 2, engine=RecordingEngine)
    servers, users = recorded(after, "support_pass"), recorded(after, "query_pass")
    assert [who for who, *_ in users] == ["q0", "q1", "q2"] * 2  # groups 0, 1, 0
    sent = [said.F for *_, said in users[:3]]
    groups = {
        "0": mean_of(servers[0][2].F, sent[0], sent[2]),
        "1": mean_of(servers[0][2].F, sent[1]),
    }
    mean = mean_of(*groups.values())
    assert_close(dict(servers[1][1].F), mean)
    expected = [groups["0"], groups["1"], groups["0"]] if start == "group" else [mean] * 3
    for (_, told, _), group in zip(users[3:], expected, strict=True):
        assert_close(dict(told.F), group)
    assert apart(groups["0"], groups["1"]) > 1e-5  # otherwise both starts would be the same
    assert same_bits(after.state.labelled, servers[1][2].F)


def test_one_group_averages_server_and_users_and_a_round_without_replies_changes_nothing() -> None:
    algorithm = make("fedrgd", threshold=0.0, strong="none", groups=1, **PLAIN)
    after = simulate(algorithm, at_server(), 1, engine=RecordingEngine)
    sent = [said.F for step in ("support_pass", "query_pass") for *_, said in recorded(after, step)]
    assert len(sent) == 3
    assert_close(dict(after.state.F), mean_of(*sent))
    assert isinstance(algorithm, FedRGD)
    assert same_bits(after.begun, simulate(algorithm, at_server(), 2, engine=DecliningEngine).state)
