"""What each algorithm goes on without, when an agent has no reply: declared, refused, and held.

Every step of every algorithm is walked, over sites of which one says that the step broke off.
test_remote_engine.py has the rules with steps of a test's own.
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

#: One of two is away: enough, or not.
LENIENT = RemoteTimeouts(
    join_seconds=0.3, visit_seconds=20.0, retry_interval=0.01, absent="skip", quorum=0.5
)
STRICT = RemoteTimeouts(
    join_seconds=0.3, visit_seconds=20.0, retry_interval=0.01, absent="stop", quorum=0.6
)
#: Steps that only some settings have.
ONLY_WITH: dict[tuple[str, str], dict[str, Any]] = {
    ("semifl", "support_statistics"): {"norm": "static"},
    ("semifl", "query_statistics"): {"norm": "static"},
    ("fedseal", "remember_prediction"): {"history_from_start": True},
    ("fedsem", "label_locally"): {"labelled_by": "local"},
    **{
        (name, "labelled_statistics"): {"norm": "static"}
        for name in ("fedavg", "fedprox", "feddyn", "lg_fedavg", "heterofl")
    },
}
WITH_BOTH_KINDS_OF_ROWS = ("mixed_pass", "learn_both", "label_locally")


def steps_of(kind: type[Any]) -> set[str]:
    """The steps that may be asked of agents."""
    names = (name for name in dir(kind) if not name.startswith("_"))
    return {name for name in names if getattr(getattr(kind, name), "runs_on_agent", False)}


def declared(without: MissingReplyPolicy) -> list[str]:
    return sorted([*without.quorum, *without.skip, *without.needed])


def without(case: str) -> MissingReplyPolicy:
    there = algorithm(case)
    return there.missing_reply_policy_for(there.cfg, private=False)


STEPS = [(name, step) for name, kind in ALGORITHMS.items() for step in sorted(steps_of(kind))]
# server_sl asks nobody but the labelled server, which is no site, and supervise no query agent.
NOBODY = [("server_sl", "labelled_pass"), ("server_sl", "labelled_statistics")]
# Of what others inherit, some ask a step of their own in its place.
NOBODY += [("supervise", "query_pass"), ("heterofl", "labelled_pass"), ("fedrgd", "mixed_pass")]
NOBODY += [pair for pair in STEPS if pair[1] == "server_pass"]
WALKED = [pair for pair in STEPS if pair not in NOBODY] + [
    ("fedssl, one after the other", "support_pass")
]


# Declared ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("private", [False, True])
def test_every_step_has_one_rule_for_a_missing_reply(case: str, private: bool) -> None:
    kind, cfg = ALGORITHMS[CASES[case][0]], algorithm(case).cfg
    rules = kind.missing_reply_policy_for(cfg, private=private)
    assert declared(rules) == sorted(steps_of(kind))
    assert bool(rules.needed) == bool(rules.needed_because)
    assert rules.absent == "stop" or rules.skip


# Held -------------------------------------------------------------------------------------------


def walked(case: str, step: str, folder: Path, terms: RemoteTimeouts) -> tuple[Simulation, int]:
    """A few rounds in which the agent that is asked first for a step has no reply to it, ever.

    Also how often it was asked.
    """
    parties: FederatedDataset = (
        at_clients() if step in WITH_BOTH_KINDS_OF_ROWS else federated_data()
    )
    away: list[str] = []

    class Bent(transports.InProcessTransport):
        def deliver(self, address: str, frame: bytes) -> bytes | None:
            visit = protocol.from_bytes(frame, IdentifyRequest, StepRequest, EndOfRun)
            if isinstance(visit, StepRequest) and visit.step == step and visit.agent in (
                *away[:1], *([] if away else [visit.agent])
            ):  # fmt: skip
                away.append(visit.agent)
                return protocol.to_bytes(StepResponse(visit.id, error="failed"))
            return super().deliver(address, frame)

    there = algorithm(case, **ONLY_WITH.get((case, step), {}))

    def engine(agents: Any, *, seed: int, **_: Any) -> Any:
        return transports.engine(agents, there, seed, folder, transport=Bent, terms=terms)

    return simulate(there, parties, engine=engine), len(away)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "step"), WALKED)
def test_a_run_goes_on_without_an_agent_where_its_algorithm_bears_it_and_not_below_the_quorum(
    case: str, step: str, tmp_path: Path
) -> None:
    with pytest.raises(SiteError, match=rf"has no reply to {step} .*\(failed\)") as stopped:
        walked(case, step, tmp_path / "strict", STRICT)
    rules = without(case)
    if step in rules.needed:
        assert rules.needed_because in str(stopped.value)
        with pytest.raises(SiteError, match=f"has no reply to {step}"):
            walked(case, step, tmp_path / "lenient", LENIENT)
        return
    way = "run.absent=skip" if step in rules.skip else "1 of 2 replied, and run.quorum is 0.6"
    assert way in str(stopped.value)
    after, asked = walked(case, step, tmp_path / "lenient", LENIENT)
    assert asked > 0 and finite(after.classifier)


def test_a_mean_of_nobody_is_not_made(tmp_path: Path) -> None:
    low = RemoteTimeouts(
        join_seconds=0.3, visit_seconds=20.0, retry_interval=0.01, absent="skip", quorum=0.01
    )
    parties = federated_data(support=1, labelled=10)
    there = algorithm("fedavg")

    class Away(transports.InProcessTransport):
        def deliver(self, address: str, frame: bytes) -> bytes | None:
            visit = protocol.from_bytes(frame, IdentifyRequest, StepRequest, EndOfRun)
            if isinstance(visit, StepRequest):
                return protocol.to_bytes(StepResponse(visit.id, error="failed"))
            return super().deliver(address, frame)

    def engine(agents: Any, *, seed: int, **_: Any) -> Any:
        return transports.engine(agents, there, seed, tmp_path, transport=Away, terms=low)

    with pytest.raises(SiteError, match="Nobody else replied either"):
        simulate(there, parties, engine=engine)


def test_a_labelled_server_is_always_there(tmp_path: Path) -> None:
    there = algorithm("server_sl")

    def engine(agents: Any, *, seed: int, **_: Any) -> Any:
        return transports.engine(agents, there, seed, tmp_path, terms=STRICT)

    assert finite(simulate(there, at_server(), engine=engine).classifier)


# Refused ----------------------------------------------------------------------------------------

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
def test_skipping_is_refused_where_no_pass_goes_from_agent_to_agent(
    method: str, tmp_path: Path
) -> None:
    assert loaded(tmp_path, method).run.absent == "stop"
    with pytest.raises(ConfigError, match=rf"run\.absent.*{method} visits no agents one after"):
        loaded(tmp_path, method, "run.absent=skip")


def test_fedssl_may_skip_in_sequence_and_under_a_plan_does_so_unless_told_otherwise(
    tmp_path: Path,
) -> None:
    sequential = "algorithm.order=sequential"
    assert loaded(tmp_path, "fedssl", sequential).run.absent == "stop"
    assert loaded(tmp_path, "fedssl", sequential, "run.absent=skip").run.absent == "skip"
    assert loaded(tmp_path, "fedssl", *PRIVATE).run.absent == "skip"
    assert loaded(tmp_path, "fedssl", *PRIVATE, "run.absent=stop").run.absent == "stop"


@pytest.mark.parametrize("method", ALGORITHMS)
def test_a_quorum_is_refused_only_where_every_reply_is_needed(method: str, tmp_path: Path) -> None:
    if method != "server_sl":
        assert loaded(tmp_path, method, "run.quorum=0.5").run.quorum == 0.5
        return
    with pytest.raises(ConfigError, match=r"run\.quorum.*server_sl needs the reply of every agent"):
        loaded(tmp_path, method, "run.quorum=0.5")
