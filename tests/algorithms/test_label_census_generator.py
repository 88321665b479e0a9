"""The generator of a label census: its loss, who trains it, and what it leaves unchanged."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from generators import VariationalImageGenerator
from privssl.algorithms.label_census.algorithm import LabelCensusConfig
from privssl.algorithms.label_census.generator_training import (
    GeneratorRequest,
    GeneratorUpdate,
    build_generator,
    generator_loss,
)
from privssl.core.task import Task
from privssl.errors import ConfigError, DataError
from privssl.experiment.config import config_hash, load_config
from privssl.experiment.row_checks import refuse_other_rows
from privssl.models.convnets import SmallCNN
from privssl.runtime.randomness import stream
from tests.algorithms.test_label_census import FEW, GENERATOR
from tests.support.toy_worlds import (
    DecliningEngine,
    RecordingEngine,
    federated_data,
    make,
    same_bits,
    simulate,
)


def test_the_loss_is_the_squared_distance_of_copies_and_the_divergence_of_codes() -> None:
    rng = stream(0, 0, "world", "x")
    fields = {
        "x": 2 * torch.rand(3, 1, 4, 4, generator=rng) - 1,
        "p": torch.eye(2)[[0, 1, 1]],
        "z": torch.rand(3, 5, generator=rng),
    }

    def generate(x: Tensor, p: Tensor, q: Tensor, z: Tensor, lam: Tensor, with_cost: bool) -> Any:
        assert with_cost and torch.equal(lam, torch.ones(3, 1))  # reconstructions
        assert torch.equal(p, q) and torch.equal(p, fields["p"]) and torch.equal(z, fields["z"])
        return x[:, None] / 2, torch.tensor([1.0, 2.0, 6.0])

    squares = (fields["x"] / 2).square().sum() / 3
    found = generator_loss(fields, 0.5, 0.1, G=generate)
    assert float(found) == pytest.approx(0.5 * float(squares) + 0.1 * 3.0)


def test_query_agents_alone_train_the_generator_and_the_classifier_stays_as_it_was() -> None:
    plain = simulate(make("label_census", **FEW), federated_data(labelled=40))
    after = simulate(make("label_census", **GENERATOR), federated_data(labelled=40),
                     engine=RecordingEngine)  # fmt: skip
    assert isinstance(after.engine, RecordingEngine)
    for name in ("F", "teacher", "histogram", "classes"):
        assert same_bits({name: getattr(plain.state, name)}, {name: getattr(after.state, name)})
    assert plain.state.G == {} and plain.algorithm.generator(plain.state) is None
    with_g = [
        (call, reply) for call, reply in after.engine.recorded
        if isinstance(call.message, GeneratorRequest)
    ]  # fmt: skip
    assert [call.to.id for call, _ in with_g] == ["q0", "q1"] * 2
    first, second = with_g[0][0].message.G, with_g[2][0].message.G
    assert not same_bits(first, second) and not same_bits(second, after.state.G)
    sent = [reply.payload for _, reply in with_g[2:]]
    assert all(isinstance(payload, GeneratorUpdate) for payload in sent)
    rows = [reply.weight for _, reply in with_g[2:]]
    for name, value in after.state.G.items():  # FedAvg, by rows
        mean = sum(w * p.G[name].double() for w, p in zip(rows, sent, strict=True)) / sum(rows)
        torch.testing.assert_close(value.double(), mean, rtol=1e-5, atol=1e-6)


def test_training_lowers_the_loss_of_the_generator() -> None:
    def loss(rounds: int) -> float:
        cfg = GENERATOR | {"generator_rounds": rounds, "local_steps": 5}
        after = simulate(make("label_census", **cfg), federated_data(labelled=40))
        G = after.algorithm.generator(after.state)
        assert G is not None
        agent = next(agent for agent in federated_data().agents if agent.role == "query")
        x = 2 * agent.unlabelled.x.float() / 255 - 1
        p = torch.full((len(x), 10), 0.1)
        z = torch.full((len(x), 4), 0.5)
        with torch.no_grad():
            return float(generator_loss({"x": x, "p": p, "z": z}, 0.0125, 0.03, G=G))

    assert loss(12) < 0.96 * loss(1)  # rows of noise, so most of it stays


def test_a_census_without_an_answer_trains_no_generator() -> None:
    after = simulate(make("label_census", **GENERATOR), federated_data(), engine=DecliningEngine)
    assert after.state.G == {} and after.algorithm.generator(after.state) is None


def test_a_generator_of_the_asked_width_and_noise_is_built() -> None:
    cfg = LabelCensusConfig(generator_rounds=1, generator_width=8, noise_size=3)
    task = Task(4, (1, 8, 12), lambda: SmallCNN((1, 8, 12), 4, width=4))
    G = build_generator(cfg, task)
    assert isinstance(G, VariationalImageGenerator) and G.noise_size == 3
    rows = G(torch.zeros(2, 1, 8, 12), torch.eye(4)[:2], torch.eye(4)[:2], torch.rand(2, 3),
             torch.zeros(2, 1))  # fmt: skip
    assert isinstance(rows, Tensor) and rows.shape == (2, 1, 1, 8, 12)
    assert bool(rows.isfinite().all())
    assert math.prod(G.up_last.weight.shape) == 8 * 1 * 4 * 4


CENSUS = """
data: {{name: npz, root: rows.npz, labelled: 20}}
agents: {{support: 2, query: 2}}
model: {{name: {model}}}
algorithm: {{name: label_census, generator_rounds: {rounds}{others}}}
"""


@pytest.mark.parametrize(
    ("shape", "model", "error", "text"),
    [
        ((1, 10, 8), "small_cnn", DataError, "sides that are multiples of 4"),
        ((5, 12), "mlp", ConfigError, "generator_rounds: G makes images and vectors"),
    ],
)
def test_a_generator_of_other_rows_is_refused(
    shape: tuple[int, ...], model: str, error: type[Exception], text: str, tmp_path: Any
) -> None:
    path = tmp_path / "census.yaml"
    path.write_text(CENSUS.format(model=model, rounds=1, others=""))
    with pytest.raises(error, match=text):
        refuse_other_rows(load_config(path), shape)
    path.write_text(CENSUS.format(model=model, rounds=0, others=""))  # the control
    refuse_other_rows(load_config(path), shape)


def test_settings_of_a_generator_count_only_if_one_is_trained(tmp_path: Any) -> None:
    """Checkpoints of earlier versions, which had no generator, stay valid."""

    def digest(rounds: int, others: str = "") -> str:
        path = tmp_path / "census.yaml"
        path.write_text(CENSUS.format(model="small_cnn", rounds=rounds, others=others))
        return config_hash(load_config(path))

    assert digest(0) == digest(0, ", generator_width: 8, weight_code: 0.5")
    assert len({digest(0), digest(1), digest(2), digest(1, ", weight_code: 0.5")}) == 4
