"""Missing replies: the rule that each algorithm declares for each step, and what runs then do.

Every step of every algorithm runs over sites of which one always reports a failed step.
test_remote_engine.py tests the rules with the steps of a minimal algorithm.
"""

from pathlib import Path
from typing import Any

import pytest

from privssl.algorithms import ALGORITHMS
from privssl.algorithms.base import MissingReplyPolicy
from privssl.data import FederatedDataset
from privssl.errors import ConfigError
from privssl.experiment import config as configs
from privssl.remote import protocol
from privssl.remote.discovery import RemoteTimeouts, SiteError
from privssl.remote.protocol import EndOfRun, IdentifyRequest, StepRequest, StepResponse
from tests.support import transports
from tests.support.algorithm_contract import CASES, algorithm
from tests.support.toy_worlds import (
    Simulation,
    at_clients,
    at_server,
    federated_data,
    finite,
    simulate,
)

#: With one of two agents absent the quorum is reached under LENIENT, and not under STRICT.
LENIENT = RemoteTimeouts(
    join_seconds=0.3, visit_seconds=20.0, retry_interval=0.01, absent="skip", quorum=0.5
)
STRICT = RemoteTimeouts(
    join_seconds=0.3, visit_seconds=20.0, retry_interval=0.01, absent="stop", quorum=0.6
)
#: Settings under which a step takes place.
SETTINGS_OF_STEP: dict[tuple[str, str], dict[str, Any]] = {
    ("semifl", "support_statistics"): {"norm": "static"},
    ("semifl", "query_statistics"): {"norm": "static"},
    ("fedseal", "remember_prediction"): {"history_from_start": True},
    ("fedsem", "label_locally"): {"labelled_by": "local"},
    ("label_census", "generator_pass"): CASES["label_census, generator"][1],
    **{
        (name, "labelled_statistics"): {"norm": "static"}
        for name in ("fedavg", "fedprox", "feddyn", "lg_fedavg", "heterofl")
    },
}
WITH_BOTH_KINDS_OF_ROWS = ("mixed_pass", "learn_both", "label_locally")


def steps_of(kind: type[Any]) -> set[str]:
    """The steps of an algorithm that run at agents."""
    names = (name for name in dir(kind) if not name.startswith("_"))
    return {name for name in names if getattr(getattr(kind, name), "runs_on_agent", False)}


def steps_with_a_rule(missing_reply_policy: MissingReplyPolicy) -> list[str]:
    return sorted(
        [*missing_reply_policy.quorum, *missing_reply_policy.skip, *missing_reply_policy.needed]
    )


def missing_reply_policy(case: str) -> MissingReplyPolicy:
    recipe = algorithm(case)
    return recipe.missing_reply_policy_for(recipe.cfg, private=False)


STEPS = [(name, step) for name, kind in ALGORITHMS.items() for step in sorted(steps_of(kind))]
# server_sl visits only the labelled server, which is not a site; supervise visits no query agent.
NEVER_SKIPPED = [("server_sl", "labelled_pass"), ("server_sl", "labelled_statistics")]
# Some algorithms replace an inherited step by one of their own.
NEVER_SKIPPED += [
    ("supervise", "query_pass"),
    ("heterofl", "labelled_pass"),
    ("fedrgd", "mixed_pass"),
]
NEVER_SKIPPED += [pair for pair in STEPS if pair[1] == "server_pass"]
TESTED_STEPS = [pair for pair in STEPS if pair not in NEVER_SKIPPED] + [
    ("fedssl, one after the other", "support_pass")
]


# Declared rules ---------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("private", [False, True])
def test_every_step_has_one_rule_for_a_missing_reply(case: str, private: bool) -> None:
    kind, cfg = ALGORITHMS[CASES[case][0]], algorithm(case).cfg
    rules = kind.missing_reply_policy_for(cfg, private=private)
    assert steps_with_a_rule(rules) == sorted(steps_of(kind))
    assert bool(rules.needed) == bool(rules.needed_because)
    assert rules.absent == "stop" or rules.skip


# Runs with a missing reply ----------------------------------------------------------------------


def simulate_without_replies(
    case: str, step: str, folder: Path, timeouts: RemoteTimeouts
) -> tuple[Simulation, int]:
    """Simulate rounds in which the first agent visited for a step always fails it.

    Returns:
        The simulation, and the number of failed requests.
    """
    parties: FederatedDataset = (
        at_clients() if step in WITH_BOTH_KINDS_OF_ROWS else federated_data()
    )
    absent: list[str] = []

    class FailingTransport(transports.InProcessTransport):
        def deliver(self, address: str, frame: bytes) -> bytes | None:
            visit = protocol.from_bytes(frame, IdentifyRequest, StepRequest, EndOfRun)
            if isinstance(visit, StepRequest) and visit.step == step and visit.agent in (
                *absent[:1], *([] if absent else [visit.agent])
            ):  # fmt: skip
                absent.append(visit.agent)
                return protocol.to_bytes(StepResponse(visit.id, error="failed"))
            return super().deliver(address, frame)

    recipe = algorithm(case, **SETTINGS_OF_STEP.get((case, step), {}))

    def engine(agents: Any, *, seed: int, **_: Any) -> Any:
        return transports.engine(
            agents, recipe, seed, folder, transport=FailingTransport, timeouts=timeouts
        )

    return simulate(recipe, parties, engine=engine), len(absent)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "step"), TESTED_STEPS)
def test_each_step_without_a_reply_stops_or_continues_the_run_by_its_declared_rule(
    case: str, step: str, tmp_path: Path
) -> None:
    with pytest.raises(SiteError, match=rf"has no reply to {step} .*\(failed\)") as stopped:
        simulate_without_replies(case, step, tmp_path / "strict", STRICT)
    rules = missing_reply_policy(case)
    if step in rules.needed:
        assert rules.needed_because in str(stopped.value)
        with pytest.raises(SiteError, match=f"has no reply to {step}"):
            simulate_without_replies(case, step, tmp_path / "lenient", LENIENT)
        return
    way = "run.absent=skip" if step in rules.skip else "1 of 2 replied, and run.quorum is 0.6"
    assert way in str(stopped.value)
    after, asked = simulate_without_replies(case, step, tmp_path / "lenient", LENIENT)
    assert asked > 0 and finite(after.classifier)


def test_a_step_without_any_reply_stops_the_run_at_any_quorum(tmp_path: Path) -> None:
    low = RemoteTimeouts(
        join_seconds=0.3, visit_seconds=20.0, retry_interval=0.01, absent="skip", quorum=0.01
    )
    parties = federated_data(support=1, labelled=10)
    recipe = algorithm("fedavg")

    class FailingTransport(transports.InProcessTransport):
        def deliver(self, address: str, frame: bytes) -> bytes | None:
            visit = protocol.from_bytes(frame, IdentifyRequest, StepRequest, EndOfRun)
            if isinstance(visit, StepRequest):
                return protocol.to_bytes(StepResponse(visit.id, error="failed"))
            return super().deliver(address, frame)

    def engine(agents: Any, *, seed: int, **_: Any) -> Any:
        return transports.engine(
            agents, recipe, seed, tmp_path, transport=FailingTransport, timeouts=low
        )

    with pytest.raises(SiteError, match="Nobody else replied either"):
        simulate(recipe, parties, engine=engine)


def test_a_labelled_server_never_counts_as_absent(tmp_path: Path) -> None:
    recipe = algorithm("server_sl")

    def engine(agents: Any, *, seed: int, **_: Any) -> Any:
        return transports.engine(agents, recipe, seed, tmp_path, timeouts=STRICT)

    assert finite(simulate(recipe, at_server(), engine=engine).classifier)


# Refused settings -------------------------------------------------------------------------------

EXPERIMENT = """
data: {name: toy, labelled: 60, unlabelled: 60, labels: LABELS}
agents: AGENTS
model: {name: small_cnn, width: 4}
algorithm: {name: METHOD}
"""
PRIVATE = ("privacy.epsilon=4.0", "privacy.delta=1.0e-3")


def loaded(folder: Path, method: str, *overrides: str) -> configs.Config:
    at_server = method == "server_sl"
    (folder / "c.yaml").write_text(
        EXPERIMENT.replace("METHOD", method)
        .replace("LABELS", "labels-at-server" if at_server else "support")
        .replace("AGENTS", "{query: 2}" if at_server else "{support: 2, query: 2}")
    )
    return configs.load_config(folder / "c.yaml", overrides)


@pytest.mark.parametrize("method", ALGORITHMS)
def test_run_absent_skip_is_refused_for_algorithms_without_a_sequential_pass(
    method: str, tmp_path: Path
) -> None:
    assert loaded(tmp_path, method).run.absent == "stop"
    with pytest.raises(ConfigError, match=rf"run\.absent.*{method} visits no agents one after"):
        loaded(tmp_path, method, "run.absent=skip")


def test_fedssl_may_skip_agents_in_sequential_order_and_private_runs_do_so_by_default(
    tmp_path: Path,
) -> None:
    sequential = "algorithm.order=sequential"
    assert loaded(tmp_path, "fedssl", sequential).run.absent == "stop"
    assert loaded(tmp_path, "fedssl", sequential, "run.absent=skip").run.absent == "skip"
    assert loaded(tmp_path, "fedssl", *PRIVATE).run.absent == "skip"
    assert loaded(tmp_path, "fedssl", *PRIVATE, "run.absent=stop").run.absent == "stop"


@pytest.mark.parametrize("method", ALGORITHMS)
def test_a_quorum_is_refused_only_if_every_reply_is_needed(method: str, tmp_path: Path) -> None:
    if method != "server_sl":
        assert loaded(tmp_path, method, "run.quorum=0.5").run.quorum == 0.5
        return
    with pytest.raises(ConfigError, match=r"run\.quorum.*server_sl needs the reply of every agent"):
        loaded(tmp_path, method, "run.quorum=0.5")
