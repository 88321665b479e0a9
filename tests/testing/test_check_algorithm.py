"""``privssl.testing.check_algorithm``: a correct algorithm passes; one that breaks a promise fails
with the promise's name. tests/algorithms/test_algorithm_contract.py checks the shipped algorithms.
"""

from pathlib import Path
from typing import Any

import pytest

import privssl
from privssl.algorithms import ALGORITHMS
from privssl.remote.step_lookup import check_steps
from privssl.testing import BrokenPromise, check_algorithm, federations
from privssl.testing.promises import PROMISES
from tests.testing import own_method

BROKEN = {
    "Learns": ("learns", "has the bits of the first state"),
    "NoReply": ("no_reply", "moved although no agent replied in round 1"),
    "Momentum": ("no_reply", "moved although no agent replied in round 2"),
    "Metrics": ("metrics", "a site does not send Mean of my rows!"),
    "Determinism": ("determinism", "two runs of one seed differ"),
    "Kept": ("determinism", "the algorithm object keeps something between visits"),
    "Unseeded": ("determinism", "seeds 0 and 1 give the same bits"),
    "Order": ("order", "in the opposite order of agents the state differs"),
    "Fields": ("fields", "Sent carries|unexpected keyword argument 'beside'"),
    "Rows": ("rows", r"Sent\.more\.seen is \(2, 1, 8, 8\), the shape of no weight"),
    "Resume": ("resume", "resumed after round 1, it ends in another state"),
    "Labels": ("labels", "labels that agents do not have change the result"),
    "Blind": ("labels", "nobody learns from them"),
    "Parties": ("parties", "one agent of each kind|not finite"),
    "Workers": ("workers", "two worker processes give another state"),
    "Sites": ("sites", "sites give another state"),
    "Privacy": ("privacy", "labelled"),
    "Unvisited": ("privacy", "support agents were charged"),
}


def test_a_correct_algorithm_keeps_all_promises() -> None:
    assert check_algorithm(own_method.Own) == {}


@pytest.mark.parametrize("name", BROKEN)
def test_an_algorithm_that_breaks_a_promise_fails_with_the_name_of_the_promise(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    promise, error_text = BROKEN[name]
    build: Any = vars(federations)["build"]

    def record_true_labels(*given: Any, **named: Any) -> Any:
        made = build(*given, **named)
        own_method.TRUE_LABELS.append(made.true_labels)
        return made

    monkeypatch.setattr(federations, "build", record_true_labels)
    with pytest.raises(BrokenPromise, match=f"{name} breaks '{promise}'.*(?:{error_text})"):
        check_algorithm(getattr(own_method, name), promises=[promise])


def test_every_promise_has_an_algorithm_that_breaks_it() -> None:
    assert {promise for promise, _ in BROKEN.values()} == set(PROMISES)


def test_also_sent_allows_declared_shapes_in_messages() -> None:
    check_algorithm(own_method.Rows, promises=["rows"], also_sent=[(2, 1, 8, 8)])


def test_promises_that_do_not_apply_are_skipped_with_a_reason() -> None:
    skipped = check_algorithm(own_method.Own, promises=["order"], sequential=True)
    assert skipped == {"order": "its agents work one after the other"}
    skipped = check_algorithm(own_method.Own, promises=["privacy"], labels="labels-at-server")
    assert "support agents have the labels" in skipped["privacy"]


@pytest.mark.parametrize(("kind", "given", "error_text"), [
    (own_method.Own, {"promises": ["lerns"]}, "unknown promise. Did you mean learns"),
    (own_method.Own, {"labels": "suport"}, "Did you mean support"),
    (own_method.OwnPlan, {}, "has a make_plan of its own, and only privssl's plans carry a claim"),
    (own_method.FixedName, {}, "needs a Config with name: str and rounds: int"),
    (privssl.Dataset, {}, "Name a class of privssl.algorithms.base.Algorithm"),
    ("m.own:Own", {}, "check_algorithm: 'm.own:Own' is no class. Import the class and give it"),
], ids=["promise", "place", "OwnPlan", "FixedName", "Dataset", "name"])  # fmt: skip
def test_wrong_arguments_are_refused_before_anything_is_simulated(
    kind: Any, given: dict[str, Any], error_text: str
) -> None:
    with pytest.raises(privssl.UserError, match=error_text):
        check_algorithm(kind, **given)


INVALID_STEPS = {
    own_method.Unannotated: "step guess: has no annotation `msg: MESSAGE`",
    own_method.NoAnswerNamed: "step guess: has no annotation `-> MESSAGE | Declined`",
    own_method.Unresolved: "step guess: its annotations cannot be read .*'Absent' is not defined",
    own_method.ThreeArguments: r"\(self, agent, msg\). A step takes \(self, agent, message, ctx",
}


@pytest.mark.parametrize("kind", INVALID_STEPS)
def test_a_step_without_usable_annotations_is_refused_by_name(kind: Any) -> None:
    with pytest.raises(privssl.UserError, match=INVALID_STEPS[kind]):
        check_algorithm(kind)


def test_a_run_with_such_a_step_is_refused_before_its_folder_is_created(tmp_path: Path) -> None:
    config = {
        "run": {"workers": 1},
        "data": {"name": "toy", "labelled": 40, "unlabelled": 60},
        "agents": {"support": 2, "query": 2},
        "algorithm": {"name": "tests.testing.own_method:Unannotated", "rounds": 1},
    }
    with pytest.raises(privssl.UserError, match="has no annotation `msg: MESSAGE`"):
        privssl.train(config, output=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", [*ALGORITHMS])
def test_every_shipped_step_names_its_messages(name: str) -> None:
    check_steps(ALGORITHMS[name])
