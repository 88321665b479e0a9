"""FedMatch with L-MixUp: the divergence from helpers, and equality with MixMatch otherwise."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from privssl.algorithms.baselines.fedmatch_mixup import agreement_loss, helper_divergence
from privssl.algorithms.fedmatch.helper_agents import unpack_helpers
from privssl.training.batched.deferred import FunctionalModule
from tests.support.toy_worlds import (
    RecordingEngine,
    Simulation,
    apart,
    federated_data,
    make,
    same_bits,
    simulate,
)

# The divergence ------------------------------------------------------------------------------

HELPERS = torch.tensor([[[0.5, 0.5], [0.9, 0.1]], [[1.0, 0.0], [0.25, 0.75]]])  # (B, H, C)
LOGITS = torch.log(torch.tensor([[0.8, 0.2], [0.25, 0.75]]))


def kl(p: list[float], q: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a)


def test_the_divergence_is_the_mean_over_helpers_of_kl_from_the_helper_to_the_agent() -> None:
    by_hand = [
        (kl([0.5, 0.5], [0.8, 0.2]) + kl([0.9, 0.1], [0.8, 0.2])) / 2,
        (kl([1.0, 0.0], [0.25, 0.75]) + 0.0) / 2,  # the second helper predicts as the agent does
    ]
    assert helper_divergence(HELPERS, LOGITS).tolist() == pytest.approx(by_hand, abs=1e-6)
    # the control: the other direction is another number
    other_way = (kl([0.8, 0.2], [0.5, 0.5]) + kl([0.8, 0.2], [0.9, 0.1])) / 2
    assert other_way != pytest.approx(by_hand[0], abs=1e-2)


def test_mixed_rows_have_their_labels_and_unmixed_rows_the_divergence() -> None:
    scale = torch.nn.Linear(2, 2, bias=False)
    torch.nn.init.eye_(scale.weight)
    fields = {
        "x": torch.log(torch.tensor([[0.5, 0.5], [0.1, 0.9]])),
        "p": torch.tensor([[0.7, 0.3], [0.0, 1.0]]),
        "plain": LOGITS,
        "helpers": HELPERS,
    }
    cross_entropy = (math.log(2) - math.log(0.9)) / 2
    divergence = float(helper_divergence(HELPERS, LOGITS).mean())
    for weight in (0.0, 0.3):
        found = agreement_loss(fields, weight, F=FunctionalModule(scale))
        assert found.item() == pytest.approx(cross_entropy + weight * divergence, abs=1e-6)


# Rounds --------------------------------------------------------------------------------------


def record(rounds: int, **settings: Any) -> tuple[Simulation, list[tuple[Any, Any]]]:
    method = make("fedmatch_mixup", **({"warm_up": 0} | settings))
    after = simulate(method, federated_data(), rounds, engine=RecordingEngine)
    assert isinstance(after.engine, RecordingEngine)
    return after, after.engine.recorded


def classifier(name: str, rounds: int, **settings: Any) -> Any:
    return simulate(make(name, warm_up=0, **settings), federated_data(), rounds).classifier


def test_without_the_divergence_it_equals_mixmatch_to_the_bit() -> None:
    alone = classifier("fedmatch_mixup", 3, divergence_weight=0.0)
    assert same_bits(alone, classifier("mixmatch", 3))
    # the control: with it, from the second round on, when helpers exist
    assert same_bits(classifier("fedmatch_mixup", 1), classifier("mixmatch", 1))
    assert not same_bits(classifier("fedmatch_mixup", 2), classifier("mixmatch", 2))


def test_helpers_are_other_agents_as_of_their_last_visit_nearest_first() -> None:
    after, recorded = record(2, helpers=2)
    agents = ("s0", "s1", "q0", "q1")
    sent = {call.to.id: reply.payload.F for call, reply in recorded if call.round == 1}
    probe = after.begun.probe
    F = after.algorithm.networks()["F"]

    def prediction(weights: Any) -> Tensor:
        F.load_state_dict(dict(weights))
        with torch.no_grad():
            answer: Tensor = F.eval()(probe).softmax(dim=1)[0]
            return answer

    places = {agent: prediction(weights) for agent, weights in sent.items()}
    for call, _ in recorded:
        got = unpack_helpers(call.message.helpers)
        if call.round == 1:
            assert not got
            continue
        others = [agent for agent in agents if agent != call.to.id]
        others.sort(key=lambda other: float((places[other] - places[call.to.id]).norm()))
        assert len(got) == 2
        assert all(same_bits(found, sent[o]) for found, o in zip(got, others, strict=False))


def test_a_large_weight_draws_agents_together() -> None:
    def spread(weight: float) -> float:
        """How far predictions of an agent are from those of its helpers, after some rounds."""
        after, _ = record(4, divergence_weight=weight, local_steps=4)
        places = torch.stack(list(after.state.embeddings.values()))
        return float((places - places.mean(dim=0)).norm())

    assert spread(20.0) < 0.7 * spread(0.0)


def test_in_sequence_each_support_agent_continues_from_the_weights_of_the_previous_one() -> None:
    after, recorded = record(1, order="sequential")  # FedSSL's Alg. 2
    requests = [call.message for call, _ in recorded]
    sent = [reply.payload.F for _, reply in recorded]
    assert [call.to.id for call, _ in recorded] == ["s0", "s1", "q0", "q1"]
    assert same_bits(requests[1].F, sent[0]) and same_bits(requests[2].F, sent[1])
    assert same_bits(requests[3].F, sent[1])
    mean = {name: ((w.double() + sent[3][name]) / 2).float() for name, w in sent[2].items()}
    assert apart(after.state.F, mean) < 1e-6
    _, parallel = record(1)
    assert all(same_bits(call.message.F, requests[0].F) for call, _ in parallel)  # the control


def test_agents_keep_steps_of_both_groups_separate() -> None:
    after, _ = record(2)
    assert_close(after.engine.memories()["s0"]["support/F/head.bias#step"], torch.tensor(4.0))
