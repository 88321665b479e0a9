"""FedMatch as its paper prints it where the authors' code differs, each with its control."""

import dataclasses
import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from privssl.algorithms.fedmatch.algorithm import FedMatch
from privssl.algorithms.fedmatch.exchange import FedMatchRequest, FedMatchUpdate
from privssl.algorithms.fedmatch.helper_agents import pack_helpers, unpack_helpers
from privssl.algorithms.fedmatch.settings import FedMatchConfig
from privssl.algorithms.fedmatch.sparse_updates import (
    DecomposedWeights,
    SparsityThresholds,
    make_sparse_download,
)
from privssl.core.federation import Federation
from privssl.core.messages import Declined, MessageError, StateDict
from tests.support.fedmatch import (
    EAGER,
    HELPERS,
    KEY,
    LEVELS,
    PLACES,
    PSI,
    SIGMA,
    Floats,
    RecordingMeter,
    X,
    Y,
    context,
    fedmatch,
    linear,
    party,
    recorded,
    row,
    softmax,
    stepped_psi,
    weights,
)
from tests.support.toy_worlds import RecordingEngine, at_clients, at_server, same_bits, simulate

STEPS = {"labels-at-server": "learn_psi", "labels-at-client": "learn_both"}


# (a) The learning rate follows the validation loss of every agent's network ------------------


@pytest.mark.parametrize("place", STEPS)
def test_the_rate_of_every_agent_follows_the_validation_loss_of_its_own_network(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: list[StateDict] = []

    def loss_of(self: Federation, network: StateDict) -> float:
        judged.append(network)
        return float(len(judged))  # it increases: each agent's first loss is its lowest

    monkeypatch.setattr(Federation, "validation_loss", loss_of)
    algorithm = fedmatch(decay_on="validation", patience=1, **EAGER)
    after = simulate(algorithm, PLACES[place](), 4, engine=RecordingEngine)
    for number, rate in ((1, 1.0), (2, 1.0), (3, 1 / 3), (4, 1 / 9)):
        for request in recorded(after, number, STEPS[place]).values():
            assert request.learning_rate == pytest.approx(0.01 * rate)
    own = algorithm.own_classifiers(after.state)
    last = dict(zip(own, judged[-2:], strict=True))
    assert same_bits(last, own)  # the agent's own network is validated
    if place == "labels-at-server":
        assert float(after.state.plateaus["server"][0]) == pytest.approx(0.01 / 27)
    assert all("pace" not in memory for memory in after.engine.memories().values())


def test_without_validation_loss_agents_without_labels_keep_their_rate() -> None:
    # The control: by the authors' rule no rate is sent, and agents without labels have none
    after = simulate(fedmatch(patience=1, **EAGER), at_server(), 3, engine=RecordingEngine)
    assert all(m.learning_rate is None for m in recorded(after, 3, "learn_psi").values())
    assert "pace" not in after.engine.memories()["q0"] and not after.state.plateaus


def test_the_optimiser_step_uses_the_rate_that_is_sent() -> None:
    for rate in (0.05, 0.01):
        sent = FedMatchRequest(weights(SIGMA), weights(PSI), learning_rate=rate)
        reply = linear(learning_rate=0.05).learn_psi(party("query"), sent, context())
        assert not isinstance(reply, Declined) and reply.psi is not None
        whole = stepped_psi(SIGMA, PSI, []) - PSI
        assert_close(reply.psi, weights(PSI + whole * rate / 0.05))


# (b) Eq. 1 and 2: every row has the divergence from the helpers ------------------------------


@pytest.mark.parametrize("tau", [0.0, 0.45, 0.99])
def test_every_unlabelled_row_has_the_divergence_from_the_helpers(tau: float) -> None:
    sent = FedMatchRequest(
        weights(SIGMA), weights(PSI), pack_helpers([weights(h) for h in HELPERS])
    )
    meter = RecordingMeter()
    algorithm = linear(threshold=tau, inter_client_rows="all", probabilities="exact")
    reply = algorithm.learn_psi(party("query"), sent, context(meter=meter))
    assert not isinstance(reply, Declined) and reply.psi is not None
    expected = weights(stepped_psi(SIGMA, PSI, HELPERS, tau, of_all=True))
    assert_close(reply.psi, expected)
    # only confident rows have pseudo-labels
    assert sum(meter.kept) == {0.0: 4, 0.45: 2, 0.99: 0}[tau]
    sure_alone = weights(stepped_psi(SIGMA, PSI, HELPERS, tau))  # the control: the authors' code
    assert torch.allclose(expected[KEY], sure_alone[KEY], atol=1e-6) == (tau == 0.0)


# (c) Helpers are used in every round, and refreshed every ten --------------------------------


def test_helpers_are_used_in_every_round_and_refreshed_when_they_are_old() -> None:
    paper: dict[str, Any] = {"keep_helpers": True, "refresh_helpers": "age"}
    settings = EAGER | {"helpers_every": 3, "rounds": 6}
    after = simulate(fedmatch(**settings | paper), at_clients(), 6, engine=RecordingEngine)
    came = [
        number
        for number in range(1, 7)
        if all(m.helpers is not None for m in recorded(after, number, "learn_both").values())
    ]
    # an agent is known after its first visit; three rounds later they are refreshed
    assert came == [2, 5]
    assert after.state.helped == 1.0  # in round 6, by those of round 5
    # The control: the authors' code, only in the round of the message.
    released = [simulate(fedmatch(**settings), at_clients(), n).state.helped for n in (3, 4)]
    assert released == [1, 0]


# (d) Sparse differences in both directions ---------------------------------------------------


@pytest.mark.parametrize("place", STEPS)
def test_sparse_messages_give_the_same_weights_as_dense_ones_with_the_same_entries(
    place: str,
) -> None:
    settings = EAGER | {"helpers": 0, "smallest_change": 1e-3, "threshold": 0.5}
    parties = PLACES[place]()
    dense = simulate(fedmatch(sparse_down=True, **settings), parties, 3).state
    sparse = simulate(fedmatch(sparse_messages=True, **settings), parties, 3, check_wire=True).state
    alike = dataclasses.replace(dense, bytes_down=sparse.bytes_down, bytes_up=sparse.bytes_up)
    assert same_bits(alike, sparse)
    assert sparse.bytes_down < dense.bytes_down == 2.0
    # the control: the omitted entries matter
    full = simulate(fedmatch(**settings), parties, 3).state
    assert not same_bits(full.psi, sparse.psi)


@pytest.mark.parametrize("place", STEPS)
def test_counted_bytes_are_the_sent_bytes(place: str) -> None:
    settings = EAGER | {"smallest_change": 1e-3, "helpers_every": 10, "refresh_helpers": "age"}
    algorithm = fedmatch(sparse_messages=True, keep_helpers=True, **settings)
    after = simulate(algorithm, PLACES[place](), 3, engine=RecordingEngine)
    entries: int = sum(w.numel() for w in after.state.psi.values())
    metrics = {**after.federation.mean_metrics(), **algorithm.metrics(after.state)}
    parts = ("sigma", "psi") if place == "labels-at-client" else ("psi",)

    def bytes_of(share: float) -> float:
        places = math.ceil(entries / 8) if 0 < share < 1 else 0
        return 4 * share * entries + places

    requests = recorded(after, 3, STEPS[place])
    assert all(request.sparse and request.helpers is None for request in requests.values())
    down = [sum(t.numel() * t.element_size() for t in part.values())
            for request in requests.values() for part in (request.sigma, request.psi)]  # fmt: skip
    # 8: the flag for a sparse message
    assert sum(down) + 8 * len(requests) == after.federation.traffic.down
    costs = [bytes_of(metrics[f"train/cost_down_{part}"]) for part in ("sigma", "psi")]
    assert sum(down) == pytest.approx(2 * sum(costs))
    assert metrics["train/bytes_down"] == pytest.approx((sum(costs) + 8) / (4 * entries))
    costs = [bytes_of(metrics[f"train/cost_up_{part}"]) for part in parts]
    assert after.federation.traffic.up == pytest.approx(2 * sum(costs))
    assert metrics["train/bytes_up"] == pytest.approx(sum(costs) / (4 * entries))
    assert metrics["train/cost_up"] == pytest.approx(
        metrics["train/cost_up_psi"] + metrics.get("train/cost_up_sigma", 0.0)
    )
    assert ("train/cost_up_sigma" in metrics) == (place == "labels-at-client")
    assert metrics["train/cost_down"] == pytest.approx(
        metrics["train/cost_down_sigma"] + metrics["train/cost_down_psi"]
    )
    assert 0 < metrics["train/cost_up_psi"] < 1  # some entries are omitted


def test_a_sparse_helper_is_the_other_agents_psi_except_for_entries_too_small_to_send() -> None:
    settings = EAGER | {"smallest_change": 1e-4, "keep_helpers": True, "refresh_helpers": "age"}
    algorithm = fedmatch(sparse_messages=True, negligible=1e-5, **settings)
    after = simulate(algorithm, at_server(), 2)
    before = simulate(algorithm, at_server(), 1).state
    kept = {
        name.removeprefix("helper/"): value
        for name, value in after.engine.memories()["q0"].items()
        if name.startswith("helper/")
    }
    [helper] = unpack_helpers(kept)
    gaps = [float((w - before.held_psi["q1"][n]).abs().max()) for n, w in helper.items()]
    assert 0 < max(gaps) <= 1e-4 + 1e-5
    others = [float((w - before.held_psi["q0"][n]).abs().max()) for n, w in helper.items()]
    assert max(others) > 2.2e-4  # the control: it differs from the agent's own


def test_a_helper_entry_of_0_is_sent_where_the_agents_entry_is_not_0() -> None:
    own = DecomposedWeights(row(1.0, 1.0), row(0.5, 0.3))
    cuts = SparsityThresholds(negligible=0.1, change=0.05)
    for decodable, entries in ((True, 1), (False, 0)):  # the authors' code does not count it
        found = make_sparse_download(own, own, [row(0.5, 0.0)], cuts, decodable=decodable)
        assert found.cost_of_helpers * 2 == entries
        assert found.masks is not None
        assert found.masks.helpers[0]["w"].tolist() == [False, decodable]


def test_a_damaged_sparse_update_is_refused_with_its_senders_name() -> None:
    algorithm = fedmatch(sparse_messages=True, **EAGER)
    begun = simulate(algorithm, at_server(), 0)

    class Damaging(RecordingEngine):
        def deliver(self, calls: Any) -> Any:
            return [
                reply if reply.sender.id != "q1"
                else dataclasses.replace(reply, content=FedMatchUpdate(None, row(1.0)))
                for reply in super().deliver(calls)
            ]  # fmt: skip

    assert begun.state is begun.begun
    with pytest.raises(MessageError, match="q1: sparse weights lack values"):
        simulate(algorithm, at_server(), 1, engine=Damaging)


# (e) The control "labels only" ----------------------------------------------------------------


def test_without_both_weights_psi_learns_from_its_penalties_only() -> None:
    alone = {"agreement_weight": 0.0, "inter_client_weight": 0.0}
    sent = FedMatchRequest(
        weights(SIGMA), weights(PSI), pack_helpers([weights(h) for h in HELPERS])
    )
    reply = linear(**alone).learn_psi(party("query"), sent, context())
    assert not isinstance(reply, Declined) and reply.psi is not None
    pull = PSI - 0.05 * (2 * 1.5 * (PSI - SIGMA) + 0.02 * np.sign(PSI))
    assert_close(reply.psi, weights(pull))
    # A threshold of 1 is no control: a row whose probability rounds to 1 in float32 still counts.
    certain, meter = np.array([[40.0, 40.0], [-40.0, -40.0], [-40.0, -40.0]]), RecordingMeter()
    request = FedMatchRequest(weights(certain), weights(-0.5 * certain))
    linear(threshold=1.0).learn_psi(party("query"), request, context(meter=meter))
    assert sum(meter.kept) == 1  # (255, 102): a logit that is 32 above the others


# (f) The profile ------------------------------------------------------------------------------


def test_the_paper_profile_has_the_settings_of_the_paper() -> None:
    for place in ("server", "client"):
        found = FedMatchConfig(profile="fedmatch-paper").hyperparameters(place)
        assert (found.threshold, found.patience, found.weight_decay) == (0.85, 5, 1e-4)
        assert (found.probabilities, found.inter_client_rows) == ("exact", "all")
        assert (found.decay_on, found.helpers_vote) == ("validation", "sure")
        assert found.keep_helpers and found.refresh_helpers == "age"
        assert found.sparse_messages and found.slices_of == "stored"
    own = FedMatchConfig(profile="fedmatch-paper", weight_decay=0.0, keep_helpers=False)
    assert own.hyperparameters("server").weight_decay == 0.0
    assert not own.hyperparameters("server").keep_helpers


@pytest.mark.parametrize(("validation", "decay_on", "refused"), [
    (0, None, ["data.validation"]), (10, None, []), (0, "labelled", []),
])  # fmt: skip
def test_the_paper_profile_needs_validation_rows(
    validation: int, decay_on: Any, refused: list[str]
) -> None:
    asked = SimpleNamespace(
        data=SimpleNamespace(labels="labels-at-server", validation=validation),
        agents=SimpleNamespace(query=3), model=SimpleNamespace(norm="none"),
        algorithm=FedMatchConfig(profile="fedmatch-paper", decay_on=decay_on),
    )  # fmt: skip
    assert [problem.key for problem in FedMatch.problems(asked)] == refused


def test_slices_in_stored_order_are_consecutive_rows_of_the_agent() -> None:
    algorithm = linear(rounds=4, stream_slices=2, batch_size=1, slices_of="stored")
    agent, seen = party("query"), []
    for number in range(1, 5):
        meter = RecordingMeter()
        request = FedMatchRequest(weights(SIGMA), weights(PSI))
        algorithm.learn_psi(agent, request, context(number, meter))
        seen.append(meter.ids)
    assert [sorted(ids) for ids in seen] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    order = agent.memory["order/unlabelled"].tolist()
    assert seen[0] == [i for i in order if i < 2] and seen[2] == [i for i in order if i >= 2]


# Variants in the paper's comparison ------------------------------------------------------------


def test_without_decomposition_one_set_of_weights_learns_from_both_kinds() -> None:
    whole = SIGMA + PSI
    sent = FedMatchRequest({}, weights(whole), pack_helpers([weights(SIGMA + h) for h in HELPERS]))
    reply = linear(decomposition=False).learn_both(party("mixed"), sent, context())
    assert reply.sigma is None and reply.psi is not None
    labelled = whole - 0.05 * 2.0 * (softmax(X @ whole.T) - np.eye(3)[Y]).T @ X / len(X)
    assert_close(reply.psi, weights(after_phi(labelled, [SIGMA + h for h in HELPERS])))
    parts = linear().learn_both(  # the control: with two parts the result differs
        party("mixed"), FedMatchRequest(weights(SIGMA), weights(PSI)), context()
    )
    assert parts.sigma is not None and parts.psi is not None
    assert not torch.allclose(parts.sigma[KEY] + parts.psi[KEY], reply.psi[KEY], atol=1e-3)


def after_phi(theta: Floats, helpers: list[Floats]) -> Floats:
    """A step of one set of weights on Phi of Eq. 2, without penalties."""
    p, said = softmax(X @ theta.T), [softmax(X @ h.T) for h in helpers]
    votes = sum((np.eye(3)[h.argmax(axis=1)] for h in said), np.eye(3)[p.argmax(axis=1)])
    gradient = 0.7 * (p - np.eye(3)[votes.argmax(axis=1)]).T @ X / len(X)
    for h in said:
        gradient = gradient + 0.3 * (p - h).T @ X / len(X) / len(said)
    return np.asarray(theta - 0.05 * gradient)


@pytest.mark.parametrize("place", PLACES)
def test_without_decomposition_rounds_start_from_the_same_network_and_cost_half(place: str) -> None:
    one = simulate(fedmatch(decomposition=False, **EAGER), PLACES[place](), 3)
    two = simulate(fedmatch(**EAGER | {"negligible": 0.0}), PLACES[place](), 1)
    start: Mapping[str, torch.Tensor] = one.algorithm.classifier(one.begun)
    assert_close(dict(start), dict(two.algorithm.classifier(two.begun)))
    assert one.state.sigma == {}
    first = simulate(fedmatch(decomposition=False, **EAGER), PLACES[place](), 1)
    assert (first.state.cost_down, two.state.cost_down) == (1.0, 2.0)
    assert not same_bits(one.classifier, start)


def test_sigma_alone_and_psi_alone_are_evaluated_if_configured() -> None:
    after = simulate(fedmatch(evaluate_parts=True, negligible=0.02, **EAGER), at_server(), 1)
    parts = after.algorithm.also_evaluated(after.state)
    assert same_bits(parts["sigma"], after.state.sigma)
    for name, weight in after.classifier.items():
        assert torch.equal(parts["sigma"][name] + parts["psi"][name], weight)
    plain = fedmatch(**EAGER)
    assert plain.also_evaluated(simulate(plain, at_server(), 1).state) == {}


def test_accuracy_on_labelled_rows_is_measured_after_each_step() -> None:
    ctx = context()
    sent = FedMatchRequest(weights(SIGMA), weights(PSI))
    reply = linear(measure_labelled=True).learn_both(party("mixed"), sent, ctx)
    assert reply.sigma is not None and reply.psi is not None
    after = (reply.sigma[KEY] + reply.psi[KEY]).double().numpy()
    right = float((softmax(X @ after.T).argmax(axis=1) == Y).mean())  # one step: all four rows
    assert ctx.metrics["train/labelled_accuracy"] == pytest.approx(right)
    quiet = context()
    linear().learn_both(party("mixed"), sent, quiet)
    assert "train/labelled_accuracy" not in quiet.metrics


def test_accuracy_on_labelled_rows_is_measured_at_agents_with_labels_only_too() -> None:
    sent, ctx, quiet = FedMatchRequest(weights(SIGMA), weights(PSI)), context(), context()
    reply = linear(measure_labelled=True).learn_sigma(party("support"), sent, ctx)
    assert reply.sigma is not None
    after = (reply.sigma[KEY] + torch.from_numpy(PSI)).double().numpy()
    right = float((softmax(X @ after.T).argmax(axis=1) == Y).mean())  # one step: all four rows
    assert ctx.metrics["train/labelled_accuracy"] == pytest.approx(right)
    linear().learn_sigma(party("support"), sent, quiet)
    assert "train/labelled_accuracy" not in quiet.metrics  # the control


def test_the_network_of_each_agent_is_its_last_one() -> None:
    algorithm = fedmatch(**EAGER | {"negligible": 0.0, "smallest_change": 0.0})
    after = simulate(algorithm, at_clients(), 2, engine=RecordingEngine)
    own = algorithm.own_classifiers(after.state)
    for call, reply in after.engine.recorded[-2:]:
        for name, weight in own[call.to.id].items():
            assert torch.equal(weight, reply.payload.sigma[name] + reply.payload.psi[name])
    assert len(LEVELS) == 4 and set(own) == {"m0", "m1"}
