"""A setting works, or is refused: none is read and then ignored."""

from typing import Any

import pytest

from privssl.algorithms import ALGORITHMS
from privssl.core.messages import Message
from tests.support.toy_worlds import RecordingEngine, at_server, federated_data, make, simulate

MEAN = {"aggregation": "mean"}


@pytest.mark.parametrize(("name", "settings", "control", "key"), [
    ("fedprox", {"aggregation": "none"}, {"proximal": 0.0}, "proximal"),
    ("uda", {"aggregation": "none", "proximal": 0.1}, MEAN, "proximal"),
    ("fixmatch", {"aggregation": "none", "weights": "equal"}, MEAN, "weights"),
    ("fedprox", {"aggregation": "none", "weights": "rows", "proximal": 0.0}, MEAN, "weights"),
    ("fedmatch", {"sparse_down": True, "sparse_messages": True}, {"sparse_messages": False},
     "sparse_down"),
    ("fedmatch", {"sparse_down": True, "profile": "fedmatch-paper"}, {"sparse_messages": False},
     "sparse_down"),
    ("fedtrinet", {"pseudo_weight": 0.5, "retrain": "mixed"}, {"retrain": "two_streams"},
     "pseudo_weight"),
    ("fedtrinet", {"pseudo_weight": 0.5, "pseudo_labels": "never"}, {"pseudo_labels": "fresh"},
     "pseudo_weight"),
    ("fedtrinet", {"freeze_shallow": True, "fine_tune_epochs": 0}, {"fine_tune_epochs": 1},
     "freeze_shallow"),
    ("semifl", {"mix_weight": 0.0, "mix_alpha": 0.5}, {"mix_weight": 1.0}, "mix_alpha"),
    ("semifl", {"mix_weight": 0.0, "mix_rows": "unsure"}, {"mix_weight": 0.1}, "mix_rows"),
    ("semifl", {"mix_weight": 0.0, "mix_drawn": "visit"}, {"mix_weight": 0.1}, "mix_drawn"),
    ("semifl", {"pseudo_labels": "training", "mix_view": "mix"}, {"pseudo_labels": "global"},
     "mix_view"),
    ("sage", {"correction": "local", "half_at": 0.1}, {"correction": "soft"}, "half_at"),
    ("fedmatch_mixup", {"divergence_weight": 0.0, "helpers": 3}, {"divergence_weight": 0.1},
     "helpers"),
])  # fmt: skip
def test_a_setting_without_effect_is_refused_and_accepted_where_it_has_one(
    name: str, settings: dict[str, Any], control: dict[str, Any], key: str
) -> None:
    def refused(**given: Any) -> list[str]:
        return [problem.key for problem in ALGORITHMS[name].Config(**given).problems()]

    assert refused(**settings) == [key]
    assert key not in refused(**(settings | control))


def test_with_a_helper_weight_of_zero_no_agent_is_sent_helpers() -> None:
    for weight, helped in ((0.0, False), (0.01, True)):
        method = make("fedmatch_mixup", warm_up=0, divergence_weight=weight)
        after = simulate(method, federated_data(), 2, engine=RecordingEngine)
        assert isinstance(after.engine, RecordingEngine)
        sent = [call.message.helpers for call, _ in after.engine.recorded]
        assert any(helpers is not None for helpers in sent) == helped


def tensors(message: Message) -> int:
    return sum(len(sent) for sent in vars(message).values() if sent)


@pytest.mark.parametrize(("decay", "networks"), [(0.0, 1), (0.9, 2)])
def test_a_teacher_that_equals_the_network_is_not_sent(decay: float, networks: int) -> None:
    method = make("pi_model", local_epochs=1, steps_of="labelled", teacher_decay=decay)
    after = simulate(method, at_server(), 2, engine=RecordingEngine)
    assert isinstance(after.engine, RecordingEngine)
    for call, reply in after.engine.recorded:
        assert tensors(call.message) == tensors(reply.payload) == networks * len(after.state.F)


def test_users_and_servers_of_fedrgd_send_no_row_count() -> None:
    for name, counted in (("fedrgd", False), ("fixmatch", True)):
        method = make(name, threshold=0.0, local_epochs=1)
        after = simulate(method, federated_data(), 1, engine=RecordingEngine)
        assert isinstance(after.engine, RecordingEngine)
        assert all((reply.weight != 1.0) == counted for _, reply in after.engine.recorded)
