"""FedSSL: every loss against a plain reference, which network it trains, and Algorithms 1 and 2.

``mixing_losses`` is called with stub networks whose outputs are known by hand, and with real small
networks, for which only the paths of gradients are checked.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close

from generators import ImageDiscriminator, ImageGenerator
from privssl.algorithms.fedssl.algorithm import FedSSL, FedSSLRequest, FedSSLUpdate
from privssl.algorithms.fedssl.losses import (
    MixupBatch,
    NetworkFunctions,
    SyntheticRows,
    draw_mixup_batch,
    gradient_similarity,
    mixing_losses,
    scale_gradient,
    select_synthetic_rows,
)
from privssl.algorithms.fedssl.settings import FedSSLConfig
from privssl.core.engine import Call
from privssl.core.messages import Reply
from privssl.core.task import Context
from privssl.engines.local import LocalEngine
from privssl.models.convnets import SmallCNN
from privssl.runtime.randomness import seeded, stream
from privssl.training import local_training
from privssl.training.batched.deferred import FunctionalModule
from tests.support.toy_worlds import (
    DecliningEngine,
    RecordingEngine,
    Simulation,
    apart,
    federated_data,
    make,
    same_bits,
    simulate,
)

ALL = ("F", "G", "D")

# Stub networks: two classes, rows of two pixels. ---------------------------------------------
#
#   F(x) = x                       the pixels are the logits
#   G(x, p, q, z, lam) = lam x + (1 - lam) z + 0.1 p - 0.2 q
#   D(x, p) = 2 x_0 - x_1 + 3 p_0


def generate(x: Tensor, p: Tensor, q: Tensor, z: Tensor, lam: Tensor) -> Tensor:
    share = lam[:, :, None]
    blend = share * x[:, None] + (1 - share) * z[:, None]
    return blend + 0.1 * p[:, None] - 0.2 * q[:, None]


def judge(x: Tensor, p: Tensor) -> Tensor:
    return 2 * x[:, 0] - x[:, 1] + 3 * p[:, 0]


def classify(x: Tensor) -> Tensor:
    return x


STUBS = NetworkFunctions(classify, generate, judge, classify, judge)
BATCH = MixupBatch(
    strong=torch.tensor([[0.9, -0.4], [-0.2, 0.1], [0.3, 0.8]]),
    mild=torch.tensor([[0.8, -0.5], [-0.1, 0.2], [0.5, 0.6]]),
    p1=torch.tensor([[1.0, 0.0], [0.3, 0.7], [0.0, 1.0]]),
    p2=torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]]),
    z=torch.tensor([[0.1, 0.9], [0.5, 0.5], [0.7, 0.3]]),
    lam=torch.tensor([0.8, 0.25, 0.0]),
)


def softplus(v: float) -> float:
    return math.log1p(math.exp(v))


def cross_entropy(logits: Sequence[float], p: Sequence[float]) -> float:
    norm = math.log(sum(math.exp(v) for v in logits))
    return -sum(share * (v - norm) for v, share in zip(logits, p, strict=True))


def reference(row: int, *, judge_by: str = "mixed") -> dict[str, float]:
    """The parts of a row's losses, in plain arithmetic, directly from Eq. 4 to 7."""
    x, strong, p1, p2, z = (
        getattr(BATCH, name)[row].tolist() for name in ("mild", "strong", "p1", "p2", "z")
    )
    lam = float(BATCH.lam[row])
    mixed = [lam * a + (1 - lam) * b for a, b in zip(p1, p2, strict=True)]

    def generated(share: float) -> list[float]:
        return [share * x[i] + (1 - share) * z[i] + 0.1 * p1[i] - 0.2 * p2[i] for i in (0, 1)]

    def judged(seen: Sequence[float], p: Sequence[float]) -> float:
        return 2 * seen[0] - seen[1] + 3 * p[0]

    weight = math.exp(max(lam, 1 - lam) - 1)
    fake = judged(generated(lam), mixed if judge_by == "mixed" else p2)
    return {
        "supervised": cross_entropy(strong, p1),
        "mix": cross_entropy(generated(lam), mixed),
        "D": softplus(-judged(x, p1)) + weight * softplus(fake),
        "real": weight * softplus(-fake),
        "rebuilt": sum((a - b) ** 2 for a, b in zip(generated(1.0), x, strict=True)),
        "agrees": float((generated(lam)[0] > generated(lam)[1]) == (mixed[0] > mixed[1])),
    }


def config(**settings: Any) -> FedSSLConfig:
    return FedSSLConfig(**settings)


def losses(
    trained: Sequence[str] = ALL, train_on_mixes: bool = True, **settings: Any
) -> tuple[dict[str, list[float]], list[bool]]:
    found, agree = mixing_losses(config(**settings), STUBS, BATCH, trained, train_on_mixes)
    return {name: loss.tolist() for name, loss in found.items()}, agree.tolist()


def expected(formula: Any, **how: str) -> Any:
    return pytest.approx([formula(reference(row, **how)) for row in range(3)], abs=1e-5)


# Values by hand ------------------------------------------------------------------------------


def test_with_an_open_gate_f_learns_rows_and_mixes_and_g_realism_and_reconstruction() -> None:
    found, agree = losses(weight_mix=0.5, weight_real=0.7, weight_reconstruction=0.2)
    assert found["F"] == expected(lambda r: r["supervised"] + 0.5 * r["mix"])
    assert found["G"] == expected(lambda r: 0.7 * r["real"] + 0.2 * r["rebuilt"])
    assert found["D"] == expected(lambda r: r["D"])
    assert agree == [bool(reference(row)["agrees"]) for row in range(3)]
    assert len(set(agree)) == 2  # both results occur


def test_with_a_closed_gate_f_learns_rows_and_g_alone_is_guided() -> None:
    found, agree = losses(train_on_mixes=False, weight_guidance=0.3)
    assert found["F"] == expected(lambda r: r["supervised"])
    assert found["G"] == expected(lambda r: r["real"] + 0.0125 * r["rebuilt"] + 0.3 * r["mix"])
    assert agree == [bool(reference(row)["agrees"]) for row in range(3)]


def test_algorithm_1_read_literally_trains_f_on_mixes_only() -> None:
    found, _ = losses(real_rows=False, weight_mix=0.5)
    assert found["F"] == expected(lambda r: 0.5 * r["mix"])
    closed, _ = losses(real_rows=False, train_on_mixes=False)
    assert closed["F"] == [0.0, 0.0, 0.0]


def test_d_judges_a_mix_by_its_target_where_eq_6_is_read_as_printed() -> None:
    found, _ = losses(judge="target")
    assert found["D"] == expected(lambda r: r["D"], judge_by="target")
    assert found["G"] == expected(lambda r: r["real"] + 0.0125 * r["rebuilt"], judge_by="target")
    assert found["D"] != losses(judge="mixed")[0]["D"]  # the control: the labels differ


def test_in_turn_g_reg_has_realism_and_reconstruction_and_g_mixup_the_mixed_cross_entropy() -> None:
    weights: dict[str, Any] = {
        "weight_mix": 0.5, "weight_real": 0.7, "weight_reconstruction": 0.2,
    }  # fmt: skip
    (reg, first), (mixup, second) = config(updates="in_turn", **weights).training_phases()
    assert (set(first), set(second)) == ({"G", "D"}, {"F", "G"})  # Alg. 1 l. 4 and 5
    found, _ = mixing_losses(reg, STUBS, BATCH, ("G", "D"), True)
    numbers = {name: loss.tolist() for name, loss in found.items()}
    assert numbers["G"] == expected(lambda r: 0.7 * r["real"] + 0.2 * r["rebuilt"])
    assert numbers["D"] == expected(lambda r: r["D"])
    assert numbers["F"] == [0.0, 0.0, 0.0]
    opened, _ = mixing_losses(mixup, STUBS, BATCH, ("F", "G"), True)
    assert opened["F"].tolist() == expected(lambda r: r["supervised"] + 0.5 * r["mix"])
    assert opened["G"].tolist() == [0.0, 0.0, 0.0]  # Eq. 4 trains G through F's loss
    closed, _ = mixing_losses(mixup, STUBS, BATCH, ("F", "G"), False)
    assert closed["G"].tolist() == expected(lambda r: 0.3 * r["mix"])
    # the control: the joint step has all losses at once
    joint, _ = losses(ALL, False, **weights)
    assert joint["G"] == pytest.approx((found["G"] + closed["G"]).tolist(), abs=1e-5)


def test_a_part_without_a_loss_for_g_does_not_change_g() -> None:
    bare = {"weight_real": 0.0, "weight_reconstruction": 0.0, "weight_guidance": 0.0}
    assert [networks for _, networks in config(updates="in_turn", **bare).training_phases()] == [
        "D",
        "F",
    ]
    coded = config(updates="in_turn", generator="variational", **bare).training_phases()
    assert [networks for _, networks in coded] == ["GD", "F"]


def test_a_weight_of_zero_disables_its_loss() -> None:
    no_realism, _ = losses(weight_real=0.0)
    assert no_realism["D"] == [0.0, 0.0, 0.0]
    assert no_realism["G"] == expected(lambda r: 0.0125 * r["rebuilt"])
    no_rebuilding, _ = losses(weight_reconstruction=0.0)
    assert no_rebuilding["G"] == expected(lambda r: r["real"])
    no_mixes, _ = losses(weight_mix=0.0)
    assert no_mixes["F"] == expected(lambda r: r["supervised"])
    unguided, _ = losses(train_on_mixes=False, weight_guidance=0.0)
    assert unguided["G"] == expected(lambda r: r["real"] + 0.0125 * r["rebuilt"])


@pytest.mark.parametrize("trained", [("F",), ("G",), ("D",), ("F", "D"), ("G", "D")])
@pytest.mark.parametrize("train_on_mixes", [True, False])
def test_networks_that_are_not_trained_have_no_loss_and_change_no_loss(
    trained: tuple[str, ...], train_on_mixes: bool
) -> None:
    found, _ = losses(trained, train_on_mixes)
    for name in ALL:
        if name not in trained:
            assert found[name] == [0.0, 0.0, 0.0]
    if "D" in trained:
        assert found["D"] == expected(lambda r: r["D"])
    if trained == ("F",):
        mix = 0.5 if train_on_mixes else 0.0
        assert found["F"] == expected(lambda r: r["supervised"] + mix * r["mix"])


# Paths of gradients --------------------------------------------------------------------------

SHAPE, CLASSES = (1, 8, 8), 3


def networks() -> dict[str, nn.Module]:
    with seeded(stream(0, 0, "world", "networks")):
        return {
            "F": SmallCNN(SHAPE, CLASSES, width=4),
            "G": ImageGenerator(SHAPE, CLASSES, width=4, code_size=8, noise_size=4),
            "D": ImageDiscriminator(SHAPE, CLASSES, width=4, feature_size=8, spectral=False),
        }


def functions(nets: Mapping[str, nn.Module]) -> NetworkFunctions:
    return NetworkFunctions(
        nets["F"],
        nets["G"],
        nets["D"],
        FunctionalModule(nets["F"]).frozen(),
        FunctionalModule(nets["D"]).frozen(),
    )


def drawn(*shape: int, purpose: str = "x") -> Tensor:
    return torch.rand(*shape, generator=stream(0, 0, "world", purpose))


def real_batch(rows: int = 4) -> MixupBatch:
    return MixupBatch(
        strong=2 * drawn(rows, *SHAPE, purpose="strong") - 1,
        mild=2 * drawn(rows, *SHAPE, purpose="mild") - 1,
        p1=torch.eye(CLASSES)[torch.arange(rows) % CLASSES],
        p2=torch.eye(CLASSES)[(torch.arange(rows) + 1) % CLASSES],
        z=drawn(rows, 4, purpose="z"),
        lam=torch.linspace(0.1, 0.9, rows),
    )


def gradients(loss: Tensor, network: nn.Module) -> Tensor:
    """Gradients of a loss for all parameters of a network, as one vector."""
    parameters = list(network.parameters())
    if not loss.requires_grad:
        return torch.zeros(sum(p.numel() for p in parameters))
    found = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
    pairs = zip(found, parameters, strict=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in pairs])


def reaches(
    callables: NetworkFunctions, nets: Mapping[str, nn.Module], train_on_mixes: bool
) -> set[str]:
    """Which loss has a gradient for which network, as "loss->network"."""
    found, _ = mixing_losses(config(), callables, real_batch(), ALL, train_on_mixes)
    return {
        f"{loss}->{name}"
        for loss in ALL
        for name in ALL
        if bool(gradients(found[loss].sum(), nets[name]).any())
    }


def test_with_the_gate_closed_each_loss_trains_its_own_network_only() -> None:
    nets = networks()
    assert reaches(functions(nets), nets, train_on_mixes=False) == {"F->F", "G->G", "D->D"}


def test_with_the_gate_open_the_cross_entropy_of_mixes_trains_g_as_well() -> None:
    nets = networks()  # Eq. 4: min over F and G
    assert reaches(functions(nets), nets, train_on_mixes=True) == {"F->F", "F->G", "G->G", "D->D"}


def test_the_check_of_gradient_paths_detects_a_network_that_is_not_frozen() -> None:
    nets = networks()
    open_F = dataclasses.replace(functions(nets), F_frozen=nets["F"])
    assert "G->F" in reaches(open_F, nets, train_on_mixes=False)
    open_D = dataclasses.replace(functions(nets), D_frozen=nets["D"])
    assert "G->D" in reaches(open_D, nets, train_on_mixes=False)


def all_gradients(train_on_mixes: bool, **settings: Any) -> dict[str, Tensor]:
    nets = networks()
    found, _ = mixing_losses(config(**settings), functions(nets), real_batch(), ALL, train_on_mixes)
    total = torch.stack([loss.mean() for loss in found.values()]).sum()
    return {name: gradients(total, nets[name]) for name in ALL}


def test_with_the_gate_closed_f_learns_nothing_from_mixes() -> None:
    loud, quiet = (all_gradients(False, weight_guidance=w)["F"] for w in (9.0, 0.0))
    assert_close(loud, quiet)
    # the control: with the gate open it does
    assert not torch.allclose(all_gradients(True)["F"], quiet)


def test_the_similarity_is_that_of_mixes_of_some_rows_and_of_other_rows() -> None:
    nets, batch = networks(), real_batch(5)
    first, last = slice(0, 3), slice(3, 5)
    lam = batch.lam[first, None]
    x_hat = nets["G"](batch.mild[first], batch.p1[first], batch.p2[first], batch.z[first], lam)
    p_mix = lam * batch.p1[first] + (1 - lam) * batch.p2[first]
    a, b = (
        gradients(torch.nn.functional.cross_entropy(nets["F"](x), p), nets["F"]).double()
        for x, p in ((x_hat[:, 0].detach(), p_mix), (batch.strong[last], batch.p1[last]))
    )
    cosine = float(a @ b / (a.norm() * b.norm()))
    found = gradient_similarity(config(batch_size=5, gate="similarity"), nets, batch)
    assert found == pytest.approx(cosine, abs=1e-5)
    # Rows after the first batch do not count.
    longer = MixupBatch(**{k: torch.cat([v, v.flip(0)]) for k, v in batch.fields().items()})
    assert gradient_similarity(config(batch_size=5), nets, longer) == found
    assert gradient_similarity(config(batch_size=4), nets, longer) != found  # the control


class Replay(nn.Module):
    """A generator that returns given images."""

    def __init__(self, images: Tensor) -> None:
        super().__init__()
        self.images = images

    def forward(self, x: Tensor, p: Tensor, q: Tensor, z: Tensor, lam: Tensor) -> Tensor:
        return self.images[:, None].expand(-1, lam.shape[1], *self.images.shape[1:])


def test_the_similarity_is_one_for_the_same_rows_and_labels_and_negative_for_wrong_labels() -> None:
    real = real_batch(4)
    other_half = real.strong[2:]

    def similarity(labels: Tensor) -> float:
        p1 = torch.cat([labels, real.p1[2:]])
        batch = dataclasses.replace(real, p1=p1, lam=torch.ones(4))
        return gradient_similarity(
            config(batch_size=4), networks() | {"G": Replay(other_half)}, batch
        )

    assert similarity(real.p1[2:]) == pytest.approx(1.0, abs=1e-5)
    assert similarity(real.p1[2:].flip(0)) < 0


@pytest.mark.parametrize("weight_mix", [0.1, 0.5, 2.0])
def test_the_guidance_of_g_has_one_weight_whether_f_learns_from_mixes_or_not(
    weight_mix: float,
) -> None:
    settings = {"weight_mix": weight_mix, "weight_guidance": 0.3}
    opened, closed = (all_gradients(gate, **settings)["G"] for gate in (True, False))
    assert_close(opened, closed, rtol=1e-3, atol=1e-6)
    unguided = all_gradients(True, **(settings | {"weight_guidance": 0.0}))["G"]
    assert not torch.allclose(opened, unguided, rtol=1e-3, atol=1e-6)  # the control


def test_what_f_learns_from_mixes_does_not_depend_on_the_guidance_of_g() -> None:
    assert_close(
        all_gradients(True, weight_guidance=0.3)["F"], all_gradients(True, weight_guidance=7.0)["F"]
    )


@given(st.floats(0, 1e6), st.floats(-10, 10, width=32))
def test_scaling_a_gradient_leaves_the_value_bit_equal(factor: float, value: float) -> None:
    x = torch.tensor([value], requires_grad=True)
    scaled = scale_gradient(x, factor)
    scaled.sum().backward()  # type: ignore[no-untyped-call]
    assert torch.equal(scaled, x)
    assert x.grad is not None and x.grad.item() == pytest.approx(factor)


def test_the_losses_of_a_row_do_not_depend_on_other_rows() -> None:
    # The loss of each row alone is its loss in the batch.
    nets, batch = networks(), real_batch()
    whole, _ = mixing_losses(config(), functions(nets), batch, ALL, True)
    for row in range(4):
        alone = MixupBatch(**{name: value[row : row + 1] for name, value in batch.fields().items()})
        found, _ = mixing_losses(config(), functions(nets), alone, ALL, True)
        for name in ALL:
            assert_close(found[name][0], whole[name][row])
    # the control: batch norm is detected
    coupled = nets | {"F": SmallCNN(SHAPE, CLASSES, width=4, norm="batch")}
    pair = MixupBatch(**{name: value[:2] for name, value in batch.fields().items()})
    both, _ = mixing_losses(config(), functions(coupled), batch, ("F",), False)
    fewer, _ = mixing_losses(config(), functions(coupled), pair, ("F",), False)
    assert not torch.allclose(both["F"][:2], fewer["F"])


# Random draws of a batch ---------------------------------------------------------------------


def context(visit: int = 1) -> Context:
    return Context(0, 1, "q0", f"1/q0/query_pass/{visit}", "attempt", torch.device("cpu"))


def test_the_draws_of_a_visit_are_in_their_ranges_and_depend_on_the_visit() -> None:
    x = (255 * drawn(200, *SHAPE)).to(torch.uint8)
    p1 = torch.eye(5)[torch.arange(200) % 5]
    first, again, other = (draw_mixup_batch(config(), x, p1, context(v)) for v in (1, 1, 2))
    assert same_bits(first, again) and not same_bits(first, other)
    assert torch.equal(first.p1, p1)
    assert set(first.p2.argmax(dim=1).tolist()) == set(range(5))  # any class of the label space
    assert torch.equal(first.p2.sum(dim=1), torch.ones(200)) and int(first.p2.max()) == 1
    assert first.z.shape == (200, 32) and bool(((first.z >= 0) & (first.z < 1)).all())
    assert bool(((first.lam >= 0) & (first.lam <= 1)).all())
    assert bool((first.mild.abs() <= 1 + 1e-6).all())
    assert not torch.equal(first.strong, first.mild)  # F and G get different views
    plain = draw_mixup_batch(config(augment="none"), x, p1, context())
    assert torch.equal(plain.strong, plain.mild)


# Rounds --------------------------------------------------------------------------------------


def record(rounds: int, **settings: Any) -> tuple[Simulation, list[tuple[Any, Any]]]:
    after = simulate(make("fedssl", **settings), federated_data(), rounds, engine=RecordingEngine)
    assert isinstance(after.engine, RecordingEngine)
    return after, after.engine.recorded


def test_a_round_calls_every_agent_once_and_each_sends_the_networks_it_trained() -> None:
    _, recorded = record(2, warm_up=1)
    asked = [(call.round, call.to.id, call.step.__name__) for call, _ in recorded]
    one_round = [("s0", "support_pass"), ("s1", "support_pass"), ("q0", "query_pass"),
                 ("q1", "query_pass")]  # fmt: skip
    assert asked == [(number, *visit) for number in (1, 2) for visit in one_round]
    for call, reply in recorded:
        warming_up = call.round == 1 and call.to.role == "query"
        assert (reply.payload.F is None) == warming_up
        assert reply.payload.G is not None and reply.payload.D is not None


def test_algorithm_1_read_literally_query_agents_train_f_from_the_first_round() -> None:
    _, recorded = record(1, warm_up=5, real_rows=False)
    assert all(call.message.train_classifier for call, _ in recorded)


def test_in_parallel_all_agents_start_from_the_same_networks() -> None:
    _, recorded = record(1)
    first = recorded[0][0].message
    assert all(same_bits(call.message.G, first.G) for call, _ in recorded)


def test_in_sequence_each_support_agent_continues_from_the_weights_of_the_previous_one() -> None:
    after, recorded = record(1, order="sequential", warm_up=0)  # Alg. 2 l. 2 and 9
    requests = [call.message for call, _ in recorded]
    sent = [reply.payload for _, reply in recorded]
    for name in ALL:
        assert same_bits(getattr(requests[0], name), getattr(after.begun, name))
        assert same_bits(getattr(requests[1], name), getattr(sent[0], name))
        assert same_bits(getattr(requests[2], name), getattr(sent[1], name))
        assert same_bits(getattr(requests[3], name), getattr(sent[1], name))
    # Alg. 2 l. 10: the query agents' networks are averaged
    mean = {k: ((v.double() + sent[3].F[k]) / 2).float() for k, v in sent[2].F.items()}
    assert apart(after.state.F, mean) < 1e-6


def test_in_sequence_without_query_training_the_support_agents_weights_are_kept() -> None:
    after, recorded = record(1, order="sequential", warm_up=1)  # query agents send no F yet
    assert same_bits(after.state.F, recorded[1][1].payload.F)


def test_local_steps_between_mixes_train_f_only() -> None:
    every, seldom = (record(1, mix_every=n, gate=0.0)[0] for n in (1, 2))
    assert not same_bits(every.state.G, seldom.state.G)
    # three steps, a mix at the first only: the agent's Adam has counted three for F and one for G
    after, _ = record(1, mix_every=3, local_steps=3)
    memory = after.engine.memories()["s0"]
    steps = {key.split("/")[1]: float(v) for key, v in memory.items() if key.endswith("#step")}
    assert steps == {"F": 3.0, "G": 1.0, "D": 1.0}


def test_in_turn_all_rows_pass_g_reg_before_any_pass_g_mixup() -> None:
    def steps(**settings: Any) -> list[tuple[str, ...]]:
        method = make("fedssl", batch_size=2, mix_every=2, **settings)
        assert isinstance(method, FedSSL)
        return [now for _, now, _, _ in method._local_steps(ALL, real_batch())]

    assert steps(updates="in_turn") == [("G", "D"), ("F", "G"), ("F",)]
    assert steps(updates="joint") == [ALL, ("F",)]  # the control


def test_in_turn_g_takes_twice_as_many_steps() -> None:
    def counted(**settings: Any) -> dict[str, float]:
        after, _ = record(1, mix_every=1, local_steps=3, gate=0.0, **settings)
        memory = after.engine.memories()["s0"]
        return {k.split("/")[1]: float(v) for k, v in memory.items() if k.endswith("#step")}

    assert counted(updates="in_turn") == {"F": 3.0, "G": 6.0, "D": 3.0}
    assert counted() == {"F": 3.0, "G": 3.0, "D": 3.0}


class Scripted(LocalEngine):
    """Agents that train nothing and report given recognition rates."""

    script = ((0.7, 0.8, None, None), (0.9, None, 0.8, 0.85), (0.1,) * 4, (None,) * 4)

    def deliver(self, calls: Sequence[Call]) -> list[Reply[Any]]:
        says = dict(zip(("s0", "s1", "q0", "q1"), self.script[calls[0].round - 1], strict=True))
        return [Reply(c.to, FedSSLUpdate(None, None, None, says[c.to.id])) for c in calls]


@pytest.mark.parametrize(
    ("rounds", "agreement", "open_from"), [(1, 0.75, 0), (2, 0.85, 3), (3, 0.1, 3), (4, 0.1, 3)]
)
def test_the_gate_opens_in_the_round_after_f_recognised_enough_mixes_and_stays_open(
    rounds: int, agreement: float, open_from: int
) -> None:
    after = simulate(make("fedssl", gate=0.8), federated_data(), rounds, engine=Scripted)
    assert after.state.agreement == pytest.approx(agreement)
    assert after.state.gate_round == open_from
    assert after.algorithm.metrics(after.state) == pytest.approx(
        {"train/agreement": agreement, "train/gate_open": float(open_from > 0)}
    )


class ScriptedSimilarity(LocalEngine):
    """Agents that train nothing and report given similarities of gradients."""

    script = ((0.9, 0.8, None, None), (0.9, None, 0.7, None), (None,) * 4, (-1.0,) * 4, (-1.0,) * 4)

    def deliver(self, calls: Sequence[Call]) -> list[Reply[Any]]:
        says = dict(zip(("s0", "s1", "q0", "q1"), self.script[calls[0].round - 1], strict=True))
        return [
            Reply(c.to, FedSSLUpdate(None, None, None, similarity=says[c.to.id])) for c in calls
        ]


@pytest.mark.parametrize(
    ("rounds", "similarity", "open_from"),
    [
        (1, 0.1 * 0.85, 0),
        (2, 0.9 * 0.085 + 0.1 * 0.8, 3),
        (3, 0.1565, 3),  # nobody reports
        (4, 0.9 * 0.1565 - 0.1, 0),
        (5, 0.9 * 0.04085 - 0.1, 0),
    ],
)
def test_the_gate_is_open_while_gradients_of_mixes_are_similar_to_those_of_rows(
    rounds: int, similarity: float, open_from: int
) -> None:
    algorithm = make("fedssl", gate="similarity")
    after = simulate(algorithm, federated_data(), rounds, engine=ScriptedSimilarity)
    assert after.state.gate_round == open_from
    metrics = after.algorithm.metrics(after.state)
    assert metrics["train/gradient_similarity"] == pytest.approx(similarity)
    assert metrics["train/gate_open"] == float(open_from > 0)


def test_agents_report_a_similarity_only_where_the_gate_asks_for_it_and_f_is_trained() -> None:
    def reported(**settings: Any) -> list[float | None]:
        return [reply.payload.similarity for _, reply in record(1, **settings)[1]]

    similarities = reported(gate="similarity", warm_up=0)
    assert all(value is not None and -1 <= value <= 1 for value in similarities)
    # s0, s1, q0, q1: in the warm-up query agents do not train F
    in_warm_up = reported(gate="similarity", warm_up=1)
    assert None not in in_warm_up[:2] and in_warm_up[2:] == [None, None]
    assert reported(warm_up=0) == [None] * 4


@pytest.mark.parametrize(("gate", "opens"), [(0.0, True), (1.0, False)])
def test_f_learns_from_mixes_only_behind_an_open_gate(gate: float, opens: bool) -> None:
    _, recorded = record(1, gate=gate)
    assert [call.message.train_on_mixes for call, _ in recorded] == [opens] * 4


def test_an_ablation_without_realism_does_not_change_d() -> None:
    after, _ = record(1, weight_real=0.0)
    parameters = [key for key in after.begun.D if not key.endswith(("_u", "_v"))]
    assert all(torch.equal(after.begun.D[key], after.state.D[key]) for key in parameters)
    assert not same_bits(after.begun.G, after.state.G)
    trained, _ = record(1)  # the control
    assert any(not torch.equal(trained.begun.D[k], trained.state.D[k]) for k in parameters)


def test_messages_contain_weights_and_a_few_listed_numbers_only() -> None:
    # A new field needs a review of what leaves an agent; then add it to this list.
    assert [field.name for field in dataclasses.fields(FedSSLUpdate)] == [
        "F",
        "G",
        "D",
        "agreement",
        "similarity",
    ]
    assert [field.name for field in dataclasses.fields(FedSSLRequest)] == [
        "F", "G", "D", "teacher", "train_classifier", "train_on_mixes"
    ]  # fmt: skip


def test_a_round_without_replies_keeps_the_state_of_the_gate() -> None:
    after = simulate(make("fedssl", gate=0.5), federated_data(), 2, engine=DecliningEngine)
    assert (after.state.agreement, after.state.gate_round) == (0.0, 0)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_to_compare_gradients_changes_no_network(
    norm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("privssl.algorithms.fedssl.gate.SIMILAR", 1.1)  # it never opens
    compared = simulate(make("fedssl", norm=norm, gate="similarity"), federated_data(), 3)
    closed = simulate(make("fedssl", norm=norm, gate=1.0), federated_data(), 3)
    assert compared.state.similarity != 0 == closed.state.similarity
    for name in ("teacher", *ALL):
        assert same_bits(getattr(compared.state, name), getattr(closed.state, name))


@pytest.mark.parametrize("labels", ["support", "labels-at-server"])
def test_a_config_without_unlabelled_rows_is_refused(labels: str) -> None:
    asked = SimpleNamespace(
        data=SimpleNamespace(labels=labels),
        agents=SimpleNamespace(query=0, mixed=0),
        model=SimpleNamespace(norm="group"),
        algorithm=SimpleNamespace(name="fedssl"),
    )
    [problem] = FedSSL.problems(asked)
    assert problem.key == "agents.query"
    asked.agents.query = 1
    assert list(FedSSL.problems(asked)) == []
    asked.model.norm = "static"  # no agent would collect its statistics
    assert [problem.key for problem in FedSSL.problems(asked)] == ["model.norm"]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_before_the_gate_opens_f_equals_that_of_pseudo_to_the_bit(norm: str) -> None:
    """Statistics of batch norm included: a pass over mixes would change them."""
    ours = simulate(make("fedssl", norm=norm, gate=1.0, warm_up=1), federated_data(), 3)
    theirs = simulate(make("pseudo", norm=norm, warm_up=1), federated_data(), 3)
    assert ours.state.gate_round == 0
    assert same_bits(ours.classifier, theirs.classifier)
    opened = simulate(make("fedssl", norm=norm, gate=0.0, warm_up=1), federated_data(), 3)
    assert not same_bits(opened.classifier, theirs.classifier)  # the control


@pytest.mark.parametrize("name", ["fedssl", "pseudo", "mixmatch"])
def test_the_pseudo_label_of_a_row_does_not_depend_on_other_rows(name: str) -> None:
    """With batch norm in training mode it would, most of all on an agent with few classes."""
    algorithm = make(name, norm="batch", augment="none", local_steps=1)
    query = next(agent for agent in federated_data().agents if agent.role == "query")
    told: list[Tensor] = []

    class RecordingMeter:
        def observe(self, ids: Tensor, labels: Tensor, kept: Tensor) -> None:
            told.extend([ids, labels])

    played = simulate(algorithm, federated_data(), 1, engine=RecordingEngine)
    assert isinstance(played.engine, RecordingEngine)
    message = played.engine.recorded[-1][0].message
    network = algorithm.task.new_classifier()
    network.load_state_dict(message.teacher)
    x = local_training.network_input(query.unlabelled.x)
    rows = {int(number): x[i : i + 1] for i, number in enumerate(query.unlabelled.ids)}
    ctx = Context(0, 1, query.id, "1", "a", torch.device("cpu"), meter=RecordingMeter())
    algorithm.query_pass(query, message, ctx)  # type: ignore[attr-defined]
    ids, labels = told
    with torch.no_grad():
        alone = {n: int(network.eval()(rows[n]).argmax()) for n in ids.tolist()}
        assert [alone[n] for n in ids.tolist()] == labels.tolist()
        together = network.train()(torch.cat([rows[n] for n in ids.tolist()])).argmax(dim=1)
    assert together.tolist() != labels.tolist()  # the control


def test_a_gate_that_can_never_open_is_refused() -> None:
    def keys(**settings: Any) -> list[str]:
        return [problem.key for problem in FedSSLConfig(**settings).problems()]

    assert keys(real_rows=False) == ["gate"]
    assert keys() == keys(real_rows=False, gate=0.0) == []


def test_a_gate_by_similarity_that_has_nothing_to_compare_is_refused() -> None:
    def problems(**settings: Any) -> list[str]:
        found = FedSSLConfig(gate="similarity", **settings).problems()
        return [f"{problem.key}: {problem.text}" for problem in found]

    [one_row] = problems(batch_size=1)
    assert one_row.startswith("gate: ") and "batch_size: 2 or more" in one_row
    [no_mixes] = problems(weight_mix=0.0)
    assert "weight_mix: 0" in no_mixes
    [synthetic] = problems(synthetic_share=0.5, synthetic_labels="condition")
    assert "Set gate to a number" in synthetic
    assert problems() == problems(synthetic_share=0.5) == []
    assert list(FedSSLConfig(batch_size=1).problems()) == []  # the control


def test_pictures_show_mixes_and_reconstructions() -> None:
    after = simulate(make("fedssl"), federated_data(), 0)
    x, y = 2 * drawn(20, 1, 8, 8) - 1, torch.arange(20) % 10
    shown = after.algorithm.pictures(after.state, x, y)
    assert set(shown) == {"images/mixes", "images/reconstruction", "images/samples"}
    assert all(image.dtype == "uint8" and image.size for image in shown.values())


def test_pictures_exist_even_if_no_held_out_row_has_some_class() -> None:
    after = simulate(make("fedssl"), federated_data(), 0)
    x, y = 2 * drawn(20, 1, 8, 8) - 1, torch.arange(20) % 10
    some = (y == 2) | (y == 7)
    whole, fewer = (
        after.algorithm.pictures(after.state, *rows)["images/mixes"]
        for rows in ((x, y), (x[some], y[some]))
    )
    assert whole.shape == fewer.shape


# Synthetic rows at query agents ---------------------------------------------------------------

STUB_F = dataclasses.replace(STUBS, F=lambda x: x.flatten(1)[:, :5])
VARIATIONAL: dict[str, Any] = {
    "generator": "variational", "weight_real": 0.0, "weight_guidance": 0.0, "weight_mix": 0.0,
    "generator_at": "query", "synthetic_share": 0.5, "warm_up": 0,
}  # fmt: skip


def test_the_code_loss_is_the_divergence_from_the_standard_normal_distribution() -> None:
    def coded(x: Tensor, p: Tensor, q: Tensor, z: Tensor, lam: Tensor, with_cost: bool) -> Any:
        assert with_cost
        return generate(x, p, q, z, lam), 7 * x[:, 0]

    stubs = dataclasses.replace(STUBS, G=coded)
    settings = config(generator="variational", weight_code=0.5, weight_guidance=0.0)
    found, _ = mixing_losses(settings, stubs, BATCH, ("G",), train_on_mixes=False)
    plain = expected(lambda r: r["real"] + 0.0125 * r["rebuilt"])
    without = [a - 3.5 * float(x[0]) for a, x in zip(found["G"].tolist(), BATCH.mild, strict=True)]
    assert without == plain


def test_g_learns_reconstruction_only_where_no_loss_uses_mixes() -> None:
    made: list[tuple[int, ...]] = []

    def coded(x: Tensor, p: Tensor, q: Tensor, z: Tensor, lam: Tensor, with_cost: bool) -> Any:
        made.append(tuple(lam.shape))
        return generate(x, p, q, z, lam), torch.zeros(len(x))

    stubs = dataclasses.replace(STUBS, G=coded)
    found, _ = mixing_losses(config(**VARIATIONAL), stubs, BATCH, ("F", "G"), train_on_mixes=True)
    assert made == [(3, 1)]  # lambda 1 alone
    assert found["G"].tolist() == expected(lambda r: 0.0125 * r["rebuilt"])
    assert found["F"].tolist() == expected(lambda r: r["supervised"])


def test_synthetic_rows_take_the_first_places_of_each_batch_with_their_own_labels() -> None:
    cfg = config(augment="none", batch_size=4, synthetic_share=0.5)
    x = (255 * drawn(10, *SHAPE)).to(torch.uint8)
    p1 = torch.eye(5)[torch.arange(10) % 5]
    places = [0, 1, 4, 5, 8, 9]
    assert select_synthetic_rows(cfg, 10).tolist() == places
    given = SyntheticRows(torch.full((6, *SHAPE), 0.5), torch.full((6, 5), 0.2))
    plain, mixed = (draw_mixup_batch(cfg, x, p1, context(), some) for some in (None, given))
    others = [i for i in range(10) if i not in places]
    assert torch.equal(mixed.strong[others], plain.strong[others])
    assert torch.equal(mixed.targets[others], p1[others])
    assert bool((mixed.strong[places] == 0.5).all()) and bool((mixed.targets[places] == 0.2).all())
    # G still learns from real rows, and all other draws are the same.
    assert torch.equal(plain.targets, p1)
    for name in ("mild", "p1", "p2", "z", "lam"):
        assert torch.equal(getattr(plain, name), getattr(mixed, name))
    losses_of = [mixing_losses(cfg, STUB_F, some, ("F",), False)[0]["F"] for some in (plain, mixed)]
    assert torch.equal(losses_of[0][others], losses_of[1][others])
    assert_close(losses_of[1][places], torch.full((6,), math.log(5)))  # equal logits


@pytest.mark.parametrize("at", ["query", "all"])
def test_only_the_configured_agents_learn_from_synthetic_rows(at: str) -> None:
    """Compared with a run without them: which agents send another F after the same request."""
    sent = []
    for share in (0.5, 0.0):
        _, recorded = record(1, **(VARIATIONAL | {"synthetic_share": share, "synthetic_at": at,
                                                  "gate": 0.0}))  # fmt: skip
        sent.append({call.to.id: reply.payload.F for call, reply in recorded})
    changed = {agent for agent in sent[0] if not same_bits(sent[0][agent], sent[1][agent])}
    assert changed == ({"q0", "q1"} if at == "query" else {"s0", "s1", "q0", "q1"})


def test_support_agents_neither_receive_nor_train_a_generator_that_learns_at_query_agents() -> None:
    after, recorded = record(1, **VARIATIONAL)
    for call, reply in recorded:
        at_query = call.to.id.startswith("q")
        assert bool(call.message.G) == (reply.payload.G is not None) == at_query
        assert not call.message.D and reply.payload.D is None  # no loss uses it
    assert not same_bits(after.begun.G, after.state.G)
    everywhere, _ = record(1, **(VARIATIONAL | {"generator_at": "all"}))
    assert not same_bits(everywhere.state.G, after.state.G)  # the control


def test_synthetic_rows_have_their_own_gate_by_the_teachers_predictions() -> None:
    asked = VARIATIONAL | {"synthetic_labels": "condition"}
    after, recorded = record(1, **asked, gate=1.0)
    said = {call.to.id: reply.payload.agreement for call, reply in recorded}
    assert said["s0"] is said["s1"] is None
    assert after.state.agreement == pytest.approx((said["q0"] + said["q1"]) / 2)
    closed, opened = (record(1, **asked, gate=gate)[0] for gate in (1.0, 0.0))
    none = record(1, **(asked | {"synthetic_share": 0.0}), gate=0.0)[0]
    assert same_bits(closed.state.F, none.state.F)
    assert not same_bits(opened.state.F, none.state.F)


def test_rows_labelled_by_the_teacher_need_no_open_gate() -> None:
    closed, opened = (record(1, **VARIATIONAL, gate=gate)[0] for gate in (1.0, 0.0))
    none = record(1, **(VARIATIONAL | {"synthetic_share": 0.0}), gate=1.0)[0]
    assert same_bits(closed.state.F, opened.state.F)
    assert not same_bits(closed.state.F, none.state.F)
    warm, cold = (
        record(1, **(VARIATIONAL | {"synthetic_share": share, "warm_up": 1}))[0]
        for share in (0.5, 0.0)
    )
    assert same_bits(warm.state.F, cold.state.F)  # query agents do not change F


@pytest.mark.parametrize("labels", ["teacher", "condition"])
def test_synthetic_rows_have_all_classes_and_the_configured_labels(labels: str) -> None:
    algorithm = make("fedssl", **(VARIATIONAL | {"synthetic_labels": labels, "local_steps": 20}))
    played = simulate(algorithm, federated_data(), 1, engine=RecordingEngine)
    assert isinstance(played.engine, RecordingEngine) and isinstance(algorithm, FedSSL)
    message = dataclasses.replace(played.engine.recorded[-1][0].message, train_on_mixes=True)
    made, recognised = algorithm._sample_generator(message, 120, context())
    assert made is not None and recognised is not None and len(made.rows) == 60
    named = made.labels.argmax(dim=1).bincount(minlength=10)
    hard = bool((made.labels.max(dim=1).values == 1).all())
    even = named.tolist() == [6] * 10
    assert even == hard == (labels == "condition")
    assert_close(made.labels.sum(dim=1), torch.ones(60))


def test_support_agents_of_a_private_run_get_no_synthetic_rows() -> None:
    def keys(at: str, privacy: Any) -> list[str]:
        asked = SimpleNamespace(
            data=SimpleNamespace(labels="support"), agents=SimpleNamespace(query=1),
            model=SimpleNamespace(norm="group"), privacy=privacy,
            algorithm=config(synthetic_share=0.5, synthetic_at=at),
        )  # fmt: skip
        return [problem.key for problem in FedSSL.problems(asked)]

    assert keys("all", object()) == ["algorithm.synthetic_at"]
    assert keys("query", object()) == keys("all", None) == []
