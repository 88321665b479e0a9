"""The privacy specification's tests of accounts and ledgers, 1 to 16, where no other file has them.

Numbers in the headings are those of the specification (section 5). Golden values are in
test_accountants.py, tampering and crashes of one account in test_ledger.py, whole private runs in
test_private_fedssl.py, kills (10, 11) in test_kill_matrix.py; here is what lies between: the same
guarantees at the level of the command, and with two real processes.
"""

import contextlib
import dataclasses
import errno
import itertools
import json
import math
import multiprocessing
import os
import re
import resource
import runpy
import shutil
import signal
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from opacus.accountants.analysis import rdp

import privssl.train as train
from accounting import verify
from accounting.accountants import ORDERS, cost_of, epsilon, rdp_epsilon
from accounting.budget import Budget
from accounting.canonical_json import real
from accounting.errors import BudgetExhausted, LedgerError, PlanError
from accounting.events import (
    ComposedEvent,
    Event,
    NonPrivateEvent,
    PoissonSampledGaussianEvent,
    PureDpEvent,
)
from accounting.ledger import Account, AccountPlan, read_journal
from benchmarks import ledger_cost
from privssl.audit import __main__ as audit
from privssl.core.messages import Declined
from privssl.engines.local import LocalEngine
from privssl.experiment import prepare
from privssl.experiment.config import Config
from privssl.experiment.prepare import Prepared
from privssl.privacy import secure_noise
from privssl.privacy.noisy_optimizer import SecureNoise
from privssl.privacy.plan import PrivatePlan
from privssl.privacy.privacy_card import render_markdown
from tests.support.card_and_audit import card_of, plan, write_run
from tests.support.command_line import Outcome, assert_refused, tree
from tests.support.ledger import rebuilt
from tests.support.private_fedssl import Sealed, accounts, configured, context, visit
from tests.support.resume import PRIVATE, Place, command, ledgers, place, signalled

__all__ = ["configured"]  # a fixture of test_private_fedssl.py

VISIT = PoissonSampledGaussianEvent(noise_multiplier=8.0, sample_rate=1.0, steps=5)


@pytest.fixture
def library() -> None:
    """For tests of the second library; all others do without it, which takes seconds a run."""
    if not verify.available():
        pytest.skip("dp-accounting is not installed")


@pytest.fixture(autouse=True)
def quick(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if "library" not in request.fixturenames:
            patch.setattr(verify, "available", lambda: False)
        yield


#: A private run of two rounds, with one visit of each support agent in each.
SHORT = PRIVATE.replace("rounds: 4", "rounds: 2")


def sealed(prepared: Prepared) -> Prepared:
    """The same run, in which reading a labelled row raises AssertionError."""
    for agent in prepared.labelled_agents:
        rows = agent.labelled
        agent.held_labelled = Sealed(rows.x, rows.y, rows.ids)
    return prepared


@pytest.fixture
def seal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run of the command is sealed."""
    real_prepare = prepare.prepare
    monkeypatch.setattr(prepare, "prepare", lambda config: sealed(real_prepare(config)))


# 1 and 2: overspending ----------------------------------------------------------------------


def spend_all(path: Path, promise: AccountPlan) -> int:
    """Visits until the account refuses; how many there were."""
    account = Account.open(path / f"{promise.agent}.jsonl", promise, resume=False)
    try:
        for number in itertools.count():
            try:
                with account.spend(promise.event, visit=f"round {number}"):
                    pass
            except BudgetExhausted:
                return number
    finally:
        account.close()
    raise AssertionError("unreachable")


def test_a_ledger_written_under_the_papers_stop_rule_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The control of every "exactly T visits": Alg. 2 looks at the total of earlier visits alone.
    def papers(self: Account, after: float) -> bool:
        return self.spent() <= self.plan.budget.epsilon

    fitting = spend_all(tmp_path / "ours", plan("s0"))
    monkeypatch.setattr(Account, "_within_budget", papers)

    assert spend_all(tmp_path / "papers", plan("s0")) == fitting + 1

    assert read_journal(tmp_path / "ours/s0.jsonl").problems == []
    [problem] = read_journal(tmp_path / "papers/s0.jsonl").problems
    assert "is above the budget" in problem.text


def test_the_papers_own_example_overspends_by_its_rule_and_by_none_of_ours(tmp_path: Path) -> None:
    # Specification, 5.2: 1.724 for a visit, three agents, budget 4. One total for all agents.
    event = PoissonSampledGaussianEvent(noise_multiplier=4.0, sample_rate=16 / 34, steps=10)
    each, budget = epsilon([event], 1e-5), Budget(4.0, 1e-5)
    assert each == pytest.approx(1.724, abs=5e-4)
    total, papers = 0.0, 0
    while not total > budget.epsilon:
        total, papers = total + each, papers + 1
    assert papers == 3
    assert total == pytest.approx(5.17, abs=0.01)
    assert math.floor(budget.epsilon / each) == 2  # with the same total, asked beforehand

    # Its numbers, were they ours to report, are nominal wherever they are printed.
    unsound = ComposedEvent((event, NonPrivateEvent("F and D are trained without noise")))
    scope: dict[str, Any] = {"scope": "as_published", "update": ("F", "D", "G"), "protect": ("G",)}
    names = ("s0", "s1", "s2")
    published = [plan(name, event=unsound, budget=budget, **scope) for name in names]
    card = card_of([(p.agent, p, [unsound], "a" * 64) for p in published])
    assert card["epsilon"]["paper_sum"] == pytest.approx(total)
    assert card["sentence"].startswith("NOMINAL")
    [line] = [row for row in render_markdown(card).splitlines() if "running sum" in row]
    assert "nominal epsilon 5.17" in line

    # Ours: each agent composes what it spent itself, and asks before it reads.
    fitting = max(t for t in range(1, 50) if epsilon([event] * t, 1e-5) <= budget.epsilon)
    assert fitting > 1
    for name in names:
        assert spend_all(tmp_path, plan(name, event=event, budget=budget)) == fitting


# 3 to 5: numbers from which no promise follows ----------------------------------------------


@pytest.mark.parametrize("number", [".inf", "-.inf", ".nan", "-1.0", "-1.0e-300"])
@pytest.mark.parametrize("acknowledged", ["true", "false"])
def test_a_budget_that_is_no_number_from_zero_up_is_refused_even_when_acknowledged(
    tmp_path: Path, number: str, acknowledged: str
) -> None:
    # The specification lets an infinite budget pass when acknowledged. Here a run without a
    # budget is one without a privacy section, so that nothing looks like a promise.
    at = place(tmp_path, PRIVATE.replace("epsilon: 4.0", f"epsilon: {number}"))
    outcome = command(at.config, at.output, f"privacy.acknowledge_unsound={acknowledged}")

    assert_refused(outcome, "privacy.epsilon", "leave the privacy section out")

    assert not at.run.exists()


def memory_of(action: Callable[[], object]) -> int:
    """Bytes that an action held at most."""
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("noise", ["0.0", "-1.0", ".nan", ".inf", "1.0e-9", "1e-3", "true"])
def test_noise_from_which_no_bound_follows_is_refused_in_no_time_and_no_memory(
    tmp_path: Path, noise: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_far(*_: object, **__: object) -> NoReturn:
        raise AssertionError("an accountant ran, or data was read")

    at = place(tmp_path, PRIVATE)
    command(at.config, "--dry-run", "privacy.noise_multiplier=-2.0")  # everything is imported
    monkeypatch.setattr(rdp, "compute_rdp", too_far)
    monkeypatch.setattr(prepare, "prepare", too_far)
    outcomes: list[Outcome] = []
    given = (at.config, at.output, f"privacy.noise_multiplier={noise}")

    started = time.process_time()
    outcomes.append(command(*given))
    assert time.process_time() - started < 0.1
    assert memory_of(lambda: outcomes.append(command(*given))) < 50 * 2**20

    for outcome in outcomes:
        assert_refused(outcome, "privacy.noise_multiplier")
    assert not at.run.exists()


def test_the_check_of_memory_notices_sixty_megabytes() -> None:
    assert memory_of(lambda: np.ones(60 * 2**17)) > 50 * 2**20


@pytest.mark.usefixtures("library")
def test_a_delta_beyond_numeric_composition_makes_a_run_without_bounds_not_an_infinite_claim(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at = place(tmp_path, PRIVATE.replace("1.0e-3", "1.0e-15"))

    assert command(at.config, at.output, "algorithm.rounds=1").status == 0

    text = (at.run / "privacy.json").read_text()
    assert "Infinity" not in text and "NaN" not in text
    for entry in json.loads(text)["agents"]:
        numbers = entry["epsilon"]
        assert 0 < numbers["value"] <= 4.0
        assert (numbers["pld_lower"], numbers["pld_upper"]) == (None, None)
        assert "delta 1e-15 is below 1e-12" in numbers["why_no_bounds"]
        assert "Use the RDP value" in numbers["why_no_bounds"]
    assert audit.main([str(at.run)]) == 0
    capsys.readouterr()


@pytest.mark.usefixtures("library")
def test_the_library_itself_would_have_said_infinity() -> None:
    # The control of the test above, and of the guard in accounting/verify.py.
    from dp_accounting.pld import privacy_loss_distribution

    loss = privacy_loss_distribution.from_gaussian_mechanism(4.0).self_compose(10)
    assert loss.get_epsilon_for_delta(1e-15) == math.inf
    assert math.isfinite(loss.get_epsilon_for_delta(1e-10))


# 7: recomputing ------------------------------------------------------------------------------


def shrink(record: dict[str, Any], field: str) -> dict[str, Any]:
    """A ledger line in which the noise or the rate of each event is one percent smaller."""
    if "event" not in record:
        return record
    event = dict(record["event"])
    event[field] = real(0.99 * float.fromhex(event[field]["hex"]))
    return {**record, "event": event}


def honest_sums(
    lines: list[dict[str, Any]], event: PoissonSampledGaussianEvent
) -> list[dict[str, Any]]:
    """The lines with the epsilon that so many such events cost."""
    done, out = 0, []
    for line in lines:
        done += line["type"] == "reserve"
        after = {"eps_after": real(epsilon([event] * done, 1e-5))} if "eps_after" in line else {}
        out.append({**line, **after})
    return out


@pytest.mark.parametrize("how", ["edited", "chain rebuilt", "chain and sums rebuilt"])
@pytest.mark.parametrize("field", ["noise_multiplier", "sample_rate"])
def test_noise_or_rate_that_is_one_percent_smaller_in_a_ledger_fails_the_audit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], field: str, how: str
) -> None:
    # No second library is needed for it: see the fixture ``quick``.
    event = PoissonSampledGaussianEvent(noise_multiplier=4.0, sample_rate=0.25, steps=5)
    write_run(tmp_path, {"s0": 3}, lambda agent: plan(agent, event=event))
    assert audit.main([str(tmp_path)]) == 3  # nothing refutes it, but there is no config to ask
    path = tmp_path / "ledger/s0.jsonl"
    lines = [json.loads(text) for text in path.read_bytes().splitlines()]

    lines = [shrink(line, field) for line in lines]
    if how == "edited":
        path.write_bytes(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
    elif how == "chain rebuilt":
        path.write_bytes(rebuilt(lines))
    else:
        less = dataclasses.replace(event, **{field: 0.99 * getattr(event, field)})
        path.write_bytes(rebuilt(honest_sums(lines, less)))
        # Now the ledger is one of another run, and only what is said elsewhere gives it away.
        assert read_journal(path).problems == []

    assert audit.main([str(tmp_path)]) == 1
    capsys.readouterr()


def printed_by(program: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> float:
    """The epsilon that an auditor's program prints."""
    path = folder / "auditor.py"
    path.write_text(program)
    capsys.readouterr()
    runpy.run_path(str(path))
    words = capsys.readouterr().out.split()
    assert words[:3] == ["epsilon", "at", "most"]
    return float(words[3])


@pytest.mark.usefixtures("library")
def test_an_auditors_program_prints_the_upper_bound(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sampled = PoissonSampledGaussianEvent(4.0, 16 / 34, 10)
    events: list[Event] = [
        sampled,
        VISIT,
        sampled,
        ComposedEvent((PoissonSampledGaussianEvent(8.0, 1.0, 95), sampled)),
    ]

    program = verify.dp_event_source(events, 1e-5)

    assert [line for line in program.splitlines() if "import" in line] == [
        "import dp_accounting as dp  # pip install dp-accounting"
    ]
    # Equal releases are counted together.
    assert program.count("SelfComposedDpEvent") == 2
    assert f"PoissonSampledDpEvent({16 / 34!r}, dp.GaussianDpEvent(4.0)), 30)" in program
    assert "SelfComposedDpEvent(dp.GaussianDpEvent(8.0), 100)" in program
    upper = verify.pld_bracket(events, 1e-5).upper
    assert printed_by(program, tmp_path, capsys) == pytest.approx(upper, abs=1e-5)
    # The control: with one percent less noise in a third of it, it prints something else.
    less = verify.dp_event_source(
        [PoissonSampledGaussianEvent(3.96, 16 / 34, 10), *events[1:]], 1e-5
    )
    assert printed_by(less, tmp_path, capsys) > upper + 1e-3


@pytest.mark.usefixtures("library")
def test_an_auditors_program_of_no_event_prints_zero(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert printed_by(verify.dp_event_source([], 1e-5), tmp_path, capsys) == 0


@pytest.mark.usefixtures("library")
def test_an_auditors_program_says_what_it_does_with_pure_releases(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gaussian = PoissonSampledGaussianEvent(4.0, 0.25, 20)
    events: list[Event] = [PureDpEvent(0.25, 2), gaussian, PureDpEvent(0.25, 1)]

    program = verify.dp_event_source(events, 1e-5)

    assert "# dp-accounting has no event for a release that is epsilon-DP with delta 0" in program
    # Basic composition: (e, d)-DP and (0.75, 0)-DP are (e + 0.75, d)-DP together.
    alone = verify.pld_bracket([gaussian], 1e-5).upper
    said = printed_by(program, tmp_path, capsys)
    assert said == pytest.approx(alone + 0.75, abs=1e-5)
    assert said >= verify.pld_bracket(events, 1e-5).upper


def test_there_is_no_program_for_what_has_no_bound() -> None:
    with pytest.raises(PlanError, match="unprotected"):
        verify.dp_event_source([NonPrivateEvent("F")], 1e-5)
    with pytest.raises(PlanError, match="Use the RDP value"):
        verify.dp_event_source([VISIT], 1e-15)


# 8: what an event means ----------------------------------------------------------------------


def test_three_blocks_of_one_batch_and_three_batches_cost_what_their_divergence_is() -> None:
    # At order 2 the divergence of one sampled release with noise s is ln(1 + q^2 (e^(1/s^2) - 1))
    # (arXiv:1908.10530, eq. 6). Three blocks of one batch see each row three times or not at all:
    # 3 / s^2 in the exponent. Three batches are three releases: their divergences add up.
    s, q = 2.0, 16 / 34
    two = ORDERS.index(2.0)
    one_batch = cost_of([PoissonSampledGaussianEvent(s / math.sqrt(3), q, 1)])
    assert one_batch.rdp[two] == pytest.approx(math.log1p(q**2 * math.expm1(3 / s**2)))
    fresh = cost_of([PoissonSampledGaussianEvent(s, q, 3)])
    assert fresh.rdp[two] == pytest.approx(3 * math.log1p(q**2 * math.expm1(1 / s**2)))
    composed = cost_of(
        [
            ComposedEvent(
                (PoissonSampledGaussianEvent(s, q, 1), PoissonSampledGaussianEvent(s, q, 2))
            )
        ]
    )
    assert composed.rdp[two] == pytest.approx(fresh.rdp[two])
    assert one_batch.rdp[two] > 1.05 * fresh.rdp[two]  # the control: they are not the same


STEPS, RATE, NOISE = 16, 0.5, 4.0


def uncoupled(config: Config, folder: Path) -> list[str]:
    """What the event that a real visit paid for says, and its sampler and noise did not do."""
    prepared = prepare.prepare(config)
    happened: list[str] = []
    masks: list[tuple[bool, ...]] = []
    noise: list[np.ndarray] = []
    draw, add = PrivatePlan.draw_batch, SecureNoise.add_noise

    def draws(self: PrivatePlan, rows: int) -> torch.Tensor:
        happened.append("batch")
        mask = draw(self, rows)
        masks.append(tuple(mask.tolist()))
        return mask

    def adds(self: Any) -> None:
        happened.append("noise")
        add(self)
        for parameter in self.params:
            noise.append((parameter.grad - parameter.summed_grad).flatten().numpy())

    with pytest.MonkeyPatch.context() as patch, accounts(prepared, folder) as agents:
        patch.setattr(PrivatePlan, "draw_batch", draws)
        patch.setattr(SecureNoise, "add_noise", adds)
        assert not isinstance(visit(prepared, agents["s0"], context("s0")), Declined)
    [event] = read_journal(folder / "s0.jsonl").events
    assert isinstance(event, PoissonSampledGaussianEvent) and isinstance(prepared.plan, PrivatePlan)
    deviation = float(np.concatenate(noise).std()) / prepared.plan.clip_norm
    rate = float(np.mean(masks))
    problems = []
    if happened != ["batch", "noise"] * event.steps:
        problems.append("releases")
    if len(set(masks)) < len(masks) - 3:  # of 2^12 masks two are seldom the same
        problems.append("batches are not fresh")
    if abs(deviation / event.noise_multiplier - 1) > 0.05:  # of thousands of numbers
        problems.append("noise")
    if abs(rate - event.sample_rate) > 5 * math.sqrt(RATE * (1 - RATE) / np.size(masks)):
        problems.append("rate")
    return problems


def one_batch_for_all(draw: Any) -> Any:
    """A sampler that draws once and hands out the same batch ever after."""
    kept: list[torch.Tensor] = []

    def draws(self: PrivatePlan, rows: int) -> torch.Tensor:
        kept[:] = kept or [draw(self, rows)]
        return kept[0]

    return draws


def half_the_noise(count: int) -> np.ndarray:
    return 0.5 * np.random.default_rng().standard_normal(count)


#: What is swapped without its other half -> what must be noticed.
SWAPPED: dict[str, tuple[Any, str, Any, list[str]]] = {
    "nothing": (PrivatePlan, "draw_batch", PrivatePlan.draw_batch, []),
    "the event says one batch, the sampler draws many": (
        PrivatePlan,
        "event",
        property(lambda self: PoissonSampledGaussianEvent(NOISE / math.sqrt(STEPS), RATE, 1)),
        ["releases", "noise"],
    ),
    "the event says fresh batches, the sampler repeats one": (
        PrivatePlan,
        "draw_batch",
        one_batch_for_all(PrivatePlan.draw_batch),
        ["batches are not fresh"],
    ),
    "half the noise is drawn": (secure_noise, "secure_normal", half_the_noise, ["noise"]),
    "every row is in every batch": (
        PrivatePlan,
        "draw_batch",
        lambda self, rows: torch.ones(rows, dtype=torch.bool),
        ["batches are not fresh", "rate"],
    ),
    "a lower rate is charged": (
        PrivatePlan,
        "event",
        property(lambda self: PoissonSampledGaussianEvent(NOISE, RATE / 4, STEPS)),
        ["rate"],
    ),
}


@pytest.mark.parametrize("swap", SWAPPED)
def test_the_event_that_is_charged_is_what_sampler_and_noise_do(
    configured: Callable[..., Config],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    swap: str,
) -> None:
    config = configured(
        f"privacy.noise_multiplier={NOISE}", f"privacy.sample_rate={RATE}",
        f"privacy.steps={STEPS}",
    )  # fmt: skip
    owner, name, new, noticed = SWAPPED[swap]
    monkeypatch.setattr(owner, name, new)

    problems = uncoupled(config, tmp_path)

    # A batch that repeats may by chance have a rate that is far off: it is not held against it.
    assert set(noticed) <= set(problems) <= {*noticed, *(["rate"] if noticed else [])}


# 9: several agents ----------------------------------------------------------------------------


def places_of(number: float, inside: Any, path: str = "") -> set[str]:
    """Where in a card a number stands."""
    if isinstance(inside, dict):
        return set().union(*(places_of(number, v, f"{path}/{k}") for k, v in inside.items()), ())
    if isinstance(inside, list):
        return set().union(*(places_of(number, v, f"{path}/{i}") for i, v in enumerate(inside)), ())
    close = isinstance(inside, float) and math.isclose(inside, number, rel_tol=1e-6)
    return {path} if close else set()


def test_no_field_of_a_card_but_the_papers_is_a_sum_of_epsilons() -> None:
    card = card_of(
        [("s0", plan("s0"), [VISIT] * 3, "a" * 64), ("s1", plan("s1"), [VISIT], "b" * 64)]
    )
    one, three = epsilon([VISIT], 1e-5), epsilon([VISIT] * 3, 1e-5)

    alone = rdp_epsilon([VISIT], 1e-5)  # exact values may not be added up
    assert places_of(4 * alone, card) == {"/epsilon/paper_sum"}
    assert places_of(4 * one, card) == set()
    assert places_of(one + three, card) == set()  # of agents
    # Records are disjoint: the largest. Who has a record at every agent: composed, and more.
    assert places_of(three, card) >= {"/epsilon/overall", "/guarantee/epsilon"}
    assert card["epsilon"]["person_across_agents"] > three

    card["guarantee"]["epsilon"] = one + three  # the control
    assert places_of(one + three, card) == {"/guarantee/epsilon"}


# Runs of the command, for all below ----------------------------------------------------------


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A private run, interrupted after the visits of round 2 of 4: its checkpoint is of round 1."""
    at = place(tmp_path_factory.mktemp("stopped"), PRIVATE.replace("every: 2", "every: 1"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "available", lambda: False)
        with signalled(LocalEngine, "deliver", 3 + 3, signal.SIGINT):  # s0, s1, then the others
            assert command(at.config, at.output).status == 130
    assert {len(read_journal(path).events) for path in ledgers(at).values()} == {2}
    return at


@pytest.fixture(scope="module")
def ended(stopped: Place, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """The same run at its end."""
    at = Place(stopped.config, tmp_path_factory.mktemp("ended") / "run")
    shutil.copytree(stopped.run, at.run)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "available", lambda: False)
        assert command(at.config, "--resume", at.run).status == 0
    return at


@pytest.fixture
def copy(stopped: Place, tmp_path: Path) -> Place:
    at = Place(stopped.config, tmp_path / "run")
    shutil.copytree(stopped.run, at.run)
    return at


def changed(at: Place, before: dict[str, tuple[bytes, int]]) -> set[str]:
    after = tree(at.run)
    return {name for name in before | after if before.get(name) != after.get(name)}


# 12: tampering, told by the commands -----------------------------------------------------------


def on_line(line: int, old: bytes, new: bytes) -> Callable[[list[bytes]], list[bytes]]:
    def edit(lines: list[bytes]) -> list[bytes]:
        assert old in lines[line - 1]
        return [*lines[: line - 1], lines[line - 1].replace(old, new, 1), *lines[line:]]

    return edit


def flipped(lines: list[bytes]) -> list[bytes]:
    middle = bytearray(lines[1])
    middle[len(middle) // 2] ^= 1
    return [lines[0], bytes(middle), *lines[2:]]


def forged(lines: list[bytes]) -> list[bytes]:
    records = [json.loads(line) for line in lines]
    told = float.fromhex(records[3]["eps_after"]["hex"])
    records[3]["eps_after"] = real(0.99 * told)
    return rebuilt(records).splitlines()


#: The lines of the ledger: a plan, then reserve and settle of two visits.
TAMPERING: dict[str, tuple[Callable[[list[bytes]], list[bytes]], str]] = {
    "a byte is flipped": (flipped, "line "),  # 2 or 3: not JSON any more, or another hash
    "a line is deleted": (lambda lines: [*lines[:2], *lines[3:]], "line 3: does not continue"),
    "a line is duplicated": (lambda lines: [*lines[:2], *lines[1:]], "line 3: does not continue"),
    "a count is negative": (on_line(2, b'"steps":2', b'"steps":-2'), "line 2: steps"),
    "a number is NaN": (on_line(2, b'"steps":2', b'"steps":NaN'), "line 2: NaN"),
    "an integer is huge": (on_line(2, b'"steps":2', b'"steps":' + b"9" * 99), "line 2: "),
    "lines are reordered": (
        lambda lines: [lines[0], *lines[3:5], *lines[1:3]], "line 2: does not continue",
    ),
    "the plan is replaced": (
        on_line(1, b'"n_public":20', b'"n_public":21'), "line 2: does not continue",
    ),
    "the tail is cut off": (lambda lines: lines[:3], "it was cut or rolled back"),
    "the sum is forged and the chain rebuilt": (forged, "line 4: says epsilon"),
}  # fmt: skip


@pytest.mark.parametrize("how", TAMPERING)
def test_no_run_goes_on_and_no_audit_passes_on_a_ledger_that_was_tampered_with(
    copy: Place, capsys: pytest.CaptureFixture[str], seal: None, how: str
) -> None:
    path = ledgers(copy)["s1"]
    tamper, told = TAMPERING[how]
    lines = path.read_bytes().splitlines()
    assert len(lines) == 5
    tampered = tamper(lines)
    assert tampered != lines
    path.write_bytes(b"".join(line + b"\n" for line in tampered))
    before = tree(copy.run)

    outcome = command(copy.config, "--resume", copy.run)

    assert_refused(outcome, str(path), told, "Put the true journal back")
    assert changed(copy, before) <= {"train.log"}  # which tells of the attempt
    assert audit.main([str(copy.run)]) == 1
    capsys.readouterr()


def test_the_same_ledger_written_anew_is_accepted(
    copy: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    # The control: what is refused above is not refused for having been touched.
    path = ledgers(copy)["s1"]
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(rebuilt([json.loads(line) for line in content.splitlines()]))
    assert path.read_bytes() == content

    assert audit.main([str(copy.run)]) == 3  # as of any interrupted run; a tampered one has 1
    assert command(copy.config, "--resume", copy.run).status == 0
    assert audit.main([str(copy.run)]) == 0
    capsys.readouterr()


# 13: rollback in both directions ---------------------------------------------------------------


def put(name: str, source: Place, target: Place) -> None:
    """Put the folder ``name`` of one run in the place of another's."""
    shutil.rmtree(target.run / name)
    shutil.copytree(source.run / name, target.run / name)


def test_an_old_checkpoint_with_the_new_ledger_keeps_every_charge(
    copy: Place, ended: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    put("ledger", ended, copy)
    paid = {name: path.read_bytes() for name, path in ledgers(copy).items()}
    spent = {name: read_journal(path).epsilon for name, path in ledgers(copy).items()}

    assert command(copy.config, "--resume", copy.run).status == 0

    for name, path in ledgers(copy).items():
        assert path.read_bytes().startswith(paid[name])
        assert spent[name] <= read_journal(path).epsilon <= 4.0
    # The rounds were made again, and the budget had been used up by those that came before.
    assert copy.results()["status"] == "budget_exhausted"
    assert copy.results()["privacy"]["guarantee"]["epsilon"] >= max(spent.values())
    assert audit.main([str(copy.run)]) == 0
    capsys.readouterr()


def test_a_new_checkpoint_with_an_old_ledger_is_refused_before_anything_is_read(
    copy: Place, ended: Place, seal: None
) -> None:
    put("checkpoints", ended, copy)
    before = tree(copy.run)

    outcome = command(copy.config, "--resume", copy.run)

    assert_refused(outcome, str(copy.run / "ledger"), "cut or rolled back", "Put the true journal")
    assert changed(copy, before) <= {"train.log"}

    put("ledger", ended, copy)  # the control: with the ledger that belongs to it, it is not
    assert command(copy.config, "--resume", copy.run).status == 0


# 14: two processes ------------------------------------------------------------------------------


def train_slowly(arguments: list[str], inside: Any) -> None:
    """The command in a process of its own, which stays for ever in the visit of s0 in round 1."""
    real_visit = LocalEngine.deliver

    def deliver(self: LocalEngine, calls: Any) -> Any:
        replies = list(real_visit(self, calls))
        inside.set()
        time.sleep(600)
        return replies

    LocalEngine.deliver = deliver  # type: ignore[method-assign]
    train.main(arguments)


@pytest.fixture
def in_use(tmp_path: Path) -> Iterator[tuple[Place, Callable[[], None]]]:
    """A run in which another process is training, and what kills that process."""
    at = place(tmp_path, SHORT)
    maker = multiprocessing.get_context("forkserver")
    maker.set_forkserver_preload(
        ["privssl.runs.round_loop", "privssl.train", "privssl.reporting.trackers"]
    )
    inside = maker.Event()
    arguments = [str(at.config), at.output, "--quiet"]
    holder = maker.Process(target=train_slowly, args=(arguments, inside), daemon=True)
    holder.start()

    def kill() -> None:
        holder.kill()
        holder.join()

    try:
        assert inside.wait(120), holder.exitcode
        yield at, kill
    finally:
        kill()


def test_of_two_processes_in_one_run_folder_the_second_fails_until_the_first_is_gone(
    in_use: tuple[Place, Callable[[], None]], seal: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    at, kill = in_use
    before = tree(at.run)

    for second in (
        [at.config, "--resume", at.run],
        [at.config, at.output, "run.overwrite=true"],
    ):
        assert_refused(command(*second), str(at.run), "another process")
    assert_refused(command(at.config, at.output), str(at.run), "exists and holds a run")
    # Nor does the account let anybody in who comes by another way.
    promise = read_journal(ledgers(at)["s0"]).plan
    with pytest.raises(LedgerError, match="another process is using this account"):
        Account.open(ledgers(at)["s0"], promise, resume=True)
    assert tree(at.run) == before

    # The locks are the operating system's: nobody has to remove one after a crash.
    kill()
    monkeypatch.undo()
    assert command(at.config, "--resume", at.run).status == 0
    assert len(read_journal(ledgers(at)["s0"]).events) == 2  # with the visit that was killed


# 15: a disk that does not take the charge -------------------------------------------------------


@contextlib.contextmanager
def failing_reserve(call: str, number: int) -> Iterator[None]:
    """Inside, the system fails when the line that pays for a visit is written, or made durable."""
    write, fsync = os.write, os.fsync
    reserved = False

    def writes(descriptor: int, data: bytes) -> int:
        nonlocal reserved
        if b'"type":"reserve"' in data:
            if call == "write":
                raise OSError(number, os.strerror(number))
            reserved = True
            if call == "full":  # for good: the file takes forty bytes more
                size = os.fstat(descriptor).st_size + 40
                resource.setrlimit(resource.RLIMIT_FSIZE, (size, former[1]))
        return write(descriptor, data)

    def fsyncs(descriptor: int) -> None:
        if reserved and call == "fsync":
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", writes)
        patch.setattr(os, "fsync", fsyncs)
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, former)


DISKS = [
    ("write", errno.ENOSPC), ("write", errno.EROFS), ("fsync", errno.EIO), ("full", errno.EFBIG),
]  # fmt: skip


@pytest.mark.parametrize(("call", "number"), DISKS)
def test_where_a_charge_cannot_be_written_the_run_ends_in_one_message_and_reads_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seal: None, call: str, number: int
) -> None:
    at = place(tmp_path, SHORT)

    with failing_reserve(call, number):
        outcome = command(at.config, at.output)

    assert_refused(
        outcome, str(ledgers(at)["s0"]), f"could not be written ({os.strerror(number)})",
        "Its rows were not read", "Free space or repair the disk, then resume",
    )  # fmt: skip
    assert outcome.err.count("\n") == 1
    # With the disk mended the run goes on, and never charges less than what may be on it.
    left = {name: len(read_journal(path).events) for name, path in ledgers(at).items()}
    assert left == {"s0": 0 if call == "write" else 1, "s1": 0}
    monkeypatch.undo()
    assert command(at.config, "--resume", at.run).status == 0
    assert len(read_journal(ledgers(at)["s0"]).events) == 2  # the budget's two, that one included


def test_the_check_of_a_failing_disk_notices_rows_that_are_read(tmp_path: Path, seal: None) -> None:
    # The control: without the failure the seal is broken.
    at = place(tmp_path, SHORT)
    with pytest.raises(AssertionError, match="a labelled row was read"):
        command(at.config, at.output)


# 16: a visit that is asked for again ------------------------------------------------------------


def test_a_server_that_repeats_a_finished_visit_gets_no_second_gradient(
    configured: Callable[..., Config], tmp_path: Path
) -> None:
    prepared = prepare.prepare(configured())
    with accounts(prepared, tmp_path) as agents:
        agent = agents["s0"]
        assert not isinstance(visit(prepared, agent, context("s0", key="1")), Declined)
        paid = (tmp_path / "s0.jsonl").read_bytes()
        sealed(prepared)

        with pytest.raises(LedgerError, match=r"s0: already spent for visit .* nothing was read"):
            visit(prepared, agent, context("s0", key="1"))

        assert (tmp_path / "s0.jsonl").read_bytes() == paid
        # The control: a visit with another key is let in, and reads.
        with pytest.raises(AssertionError, match="a labelled row was read"):
            visit(prepared, agent, context("s0", key="2"))


# The benchmark of the account's cost ------------------------------------------------------------


def test_the_benchmark_counts_the_time_of_the_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "tiny.yaml"
    config.write_text(SHORT)
    fsync, slow = os.fsync, 0.02

    def slowly(descriptor: int) -> None:
        time.sleep(slow)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", slowly)

    assert ledger_cost.main([str(config), "--repeats", "1"]) == 1

    shown = capsys.readouterr().out
    assert "machine: " in shown and "NOT below 2%" in shown
    found = re.search(r"([0-9.]+) ms in accounts for 4 visits: ([0-9.]+)%", shown)
    assert found is not None
    # Two plan lines, and reserve and settle of four visits: each forces file and folder.
    assert float(found[1]) >= 1e3 * slow * 2 * (2 + 2 * 4)
    assert float(found[2]) > 2


def test_the_benchmark_refuses_a_run_that_has_no_account(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "tiny.yaml"
    config.write_text(SHORT)

    assert ledger_cost.main([str(config), "privacy=null"]) == 2

    assert "no account to measure" in capsys.readouterr().err
