"""FedSSL-DP from config to claim: what docs/privacy.md promises of a run.

Tests cover budgets, what a support agent sends, and randomness that no seed controls. Killed runs
are in test_kill_matrix.py.
"""

import csv
import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import privssl.train as train
from accounting.accountants import epsilon
from accounting.budget import Budget
from accounting.events import PoissonSampledGaussianEvent
from accounting.ledger import read_journal
from privssl.algorithms import ALGORITHMS
from privssl.algorithms.fedssl.algorithm import FedSSL, FedSSLUpdate
from privssl.core.agents import LabelledRows
from privssl.core.federation import Federation
from privssl.core.messages import Declined, Reply
from privssl.errors import ConfigError, PrivacyError
from privssl.experiment import config
from privssl.experiment.config import Config
from privssl.experiment.prepare import Prepared, prepare
from privssl.privacy import secure_noise
from privssl.privacy.dp_sgd import PrivateTraining
from privssl.privacy.plan import PrivatePlan
from privssl.reporting import figures
from tests.support.private_fedssl import (
    PRIVATE,
    TINY,
    Sealed,
    accounts,
    carry_out,
    context,
    epsilon_of_full_batches,
    make_request,
    visit,
)
from tests.support.toy_worlds import without_noise

AS_PUBLISHED = ["privacy.update_at_support=[F, D, G]", "privacy.protect=[G]"]


def equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


# What is refused before anything is read --------------------------------------------------------


def test_the_published_scheme_needs_an_acknowledgement(configured: Callable[..., Config]) -> None:
    with pytest.raises(ConfigError, match=r"guarantees nothing for any row.*acknowledge_unsound"):
        configured(*AS_PUBLISHED)
    accepted = configured(*AS_PUBLISHED, "privacy.acknowledge_unsound=true")
    assert accepted.privacy is not None and accepted.privacy.scope == "as_published"


@pytest.mark.parametrize("protect", ["[F]", "[F, G]", "[D]"])
def test_other_partial_protection_is_refused_even_when_acknowledged(
    protect: str, configured: Callable[..., Config]
) -> None:
    with pytest.raises(ConfigError, match="trained at support agents without protection"):
        configured(
            "privacy.update_at_support=[F, D, G]", f"privacy.protect={protect}",
            "privacy.acknowledge_unsound=true",
        )  # fmt: skip


@pytest.mark.parametrize("name", [n for n, kind in ALGORITHMS.items() if not kind.can_be_private])
def test_a_privacy_section_is_refused_for_an_algorithm_without_a_private_pass(
    name: str, tmp_path: Path
) -> None:
    # It would train on labelled rows without noise, and charge no account.
    path = tmp_path / "plain.yaml"
    text = TINY.partition("algorithm:")[0] + f"algorithm: {{name: {name}}}\n"
    path.write_text(text)
    fitting = {  # settings that its placement or few rows require
        "server_sl": ["data.labels=labels-at-server", "agents.support=0"],
        "fedseal": ["algorithm.validation_rows=1"],
    }.get(name, [])
    config.load_config(path, fitting)  # the control: the config is valid otherwise
    with pytest.raises(ConfigError, match=f"{name} reads labelled rows without noise"):
        config.load_config(path, [*fitting, "privacy.epsilon=4.0"])


def test_a_privacy_section_is_refused_for_a_labelled_server_since_the_observer_controls_it(
    configured: Callable[..., Config],
) -> None:
    at_server = ("data.labels=labels-at-server", "agents.support=0", "agents.query=2")
    configured(*at_server, private=False)  # the control: the config is valid otherwise
    with pytest.raises(ConfigError, match="a claim is against whoever controls the server"):
        configured(*at_server)
    configured("data.labels=labels-at-client", "agents.support=0", "agents.mixed=2")


def test_batch_norm_is_refused_when_the_config_is_read(configured: Callable[..., Config]) -> None:
    with pytest.raises(ConfigError, match="batch norm couples the rows"):
        configured("model.norm=batch")


def test_batch_norm_is_refused_by_layer_name_if_the_config_check_is_bypassed(
    configured: Callable[..., Config],
) -> None:
    good = configured()
    bad = dataclasses.replace(good, model=dataclasses.replace(good.model, norm="batch"))
    with pytest.raises(PrivacyError, match=r"F\.trunk\.2 \(BatchNorm2d\)"):
        prepare(bad)


@pytest.fixture
def record_visits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, Any, Reply[Any]]]:
    """Every visit of a run: agent, step, request, reply."""
    visits: list[tuple[str, str, Any, Reply[Any]]] = []
    ask_each = Federation.call_all

    def record(self: Federation, whom: Any, step: Any, message: Any) -> Any:
        replies = ask_each(self, whom, step, message)
        visits.extend((r.sender.id, step.__name__, message, r) for r in replies)
        return replies

    monkeypatch.setattr(Federation, "call_all", record)
    return visits


def test_a_budget_for_three_visits_pays_for_exactly_three_and_the_run_goes_on(
    configured: Callable[..., Config], tmp_path: Path, record_visits: list[Any]
) -> None:
    three, four = (epsilon_of_full_batches(visits, 4.0, 1e-5) for visits in (3, 4))
    budget = (three + four) / 2
    prepared = prepare(
        configured(
            "algorithm.rounds=8", "privacy.sample_rate=1.0", "privacy.steps=1",
            "run.checkpoint_every=100", f"privacy.epsilon={budget}",
        )
    )  # fmt: skip
    results = carry_out(prepared, tmp_path / "run")
    assert (results["status"], results["rounds"]) == ("budget_exhausted", 8)
    for name in ("s0", "s1"):
        journal = read_journal(tmp_path / f"run/ledger/{name}.jsonl")
        assert len(journal.visits) == 3 and not journal.problems
        assert epsilon(journal.events, 1e-5) <= budget
    assert results["privacy"]["guarantee"]["epsilon"] == budget  # eight visits were planned
    _refused_visits_change_nothing(record_visits)


def _refused_visits_change_nothing(record_visits: Sequence[Any]) -> None:
    """In rounds 4 to 8 s1 starts from what s0 got, and the query agent from what s1 got."""
    by_agent: dict[str, list[Any]] = {"s0": [], "s1": [], "q0": []}
    for agent, _, message, reply in record_visits:
        by_agent[agent].append((message, reply))
    for to_s0, to_s1, to_q0 in list(zip(*by_agent.values(), strict=True))[3:]:
        assert to_s0[1].declined and to_s1[1].declined
        assert to_s0[1].content.reason == "privacy budget is spent"
        for name in ("F", "G", "D", "teacher"):
            assert equal(getattr(to_s0[0], name), getattr(to_s1[0], name))
            assert equal(getattr(to_s1[0], name), getattr(to_q0[0], name))
    # The control: charged visits change the weights.
    paid = [by_agent[agent][0][0].F for agent in ("s0", "s1", "q0")]
    assert not equal(paid[0], paid[1]) and not equal(paid[1], paid[2])


def _sealed(prepared: Prepared) -> Prepared:
    for agent in prepared.labelled_agents:
        rows = agent.labelled
        agent.held_labelled = Sealed(rows.x, rows.y, rows.ids)
    return prepared


def test_with_a_budget_of_zero_no_labelled_row_is_ever_read_and_the_run_completes(
    configured: Callable[..., Config], tmp_path: Path, record_visits: list[Any]
) -> None:
    results = carry_out(_sealed(prepare(configured("privacy.epsilon=0.0"))), tmp_path / "run")
    assert (results["status"], results["rounds"]) == ("finished", 3)
    assert results["privacy"]["guarantee"]["epsilon"] == 0
    assert {agent for agent, *_ in record_visits} == {"q0"}


def test_the_seal_notices_that_rows_are_read(
    configured: Callable[..., Config], tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match="a labelled row was read"):
        carry_out(_sealed(prepare(configured())), tmp_path / "run")


def test_a_declined_visit_reads_no_row(configured: Callable[..., Config], tmp_path: Path) -> None:
    prepared = _sealed(prepare(configured()))
    less = Budget(0.01, 1e-5)  # less than a visit costs; a site's operator may set this
    promises = {n: dataclasses.replace(p, budget=less) for n, p in prepared.account_plans.items()}
    prepared = dataclasses.replace(prepared, account_plans=promises)
    with accounts(prepared, tmp_path) as agents:
        assert isinstance(visit(prepared, agents["s0"], context("s0")), Declined)
        assert agents["s0"].account is not None and agents["s0"].account.visits() == 0


def test_a_visit_is_charged_before_its_rows_are_read(
    configured: Callable[..., Config], tmp_path: Path
) -> None:
    prepared = _sealed(prepare(configured()))
    with accounts(prepared, tmp_path) as agents:
        with pytest.raises(AssertionError, match="a labelled row was read"):
            visit(prepared, agents["s0"], context("s0"))
        assert len(read_journal(tmp_path / "s0.jsonl").visits) == 1


# What leaves a support agent --------------------------------------------------------------------


@pytest.mark.parametrize("networks", ["F", "G", "D", "FG", "FGD"])
def test_a_sound_visit_sends_only_the_parameters_of_protected_networks(
    networks: str, configured: Callable[..., Config], tmp_path: Path
) -> None:
    named = f"[{', '.join(networks)}]"
    prepared = prepare(
        configured(
            f"privacy.update_at_support={named}", f"privacy.protect={named}",
            "algorithm.gate=similarity",
        )
    )  # fmt: skip
    came = make_request(prepared)
    with accounts(prepared, tmp_path) as agents:
        ctx = context("s0")
        ctx.telemetry = agents["s0"].account is None
        sent = visit(prepared, agents["s0"], ctx)
        assert not agents["s0"].memory  # no optimiser state is kept
    assert isinstance(sent, FedSSLUpdate) and sent.agreement is sent.similarity is None
    assert ctx.metrics == {} and ctx.weight == 1.0
    for name, network in prepared.algorithm.networks().items():
        state = getattr(sent, name)
        if name in networks:
            assert set(state) == {key for key, _ in network.named_parameters()}
            assert not equal(state, getattr(came, name))
        else:
            assert state is None
            assert equal(network.state_dict(), getattr(came, name))  # buffers count


def test_the_check_of_frozen_networks_detects_a_moving_spectral_norm(
    configured: Callable[..., Config],
) -> None:
    prepared = prepare(configured())
    D, before = prepared.algorithm.networks()["D"], make_request(prepared).D
    with torch.no_grad():
        D.eval()(torch.zeros(1, 1, 8, 8), torch.ones(1, 10))
        assert equal(D.state_dict(), before)
        D.train()(torch.zeros(1, 1, 8, 8), torch.ones(1, 10))
        assert not equal(D.state_dict(), before)


def test_where_the_discriminator_is_protected_it_has_no_spectral_norm(
    configured: Callable[..., Config],
) -> None:
    named = ["privacy.update_at_support=[F, D, G]", "privacy.protect=[F, D, G]"]
    D = prepare(configured(*named)).algorithm.networks()["D"]
    assert not list(D.buffers())
    assert list(prepare(configured()).algorithm.networks()["D"].buffers())


def test_the_published_scheme_sends_all_three_networks_and_calls_its_epsilon_nominal(
    configured: Callable[..., Config], tmp_path: Path, record_visits: list[Any]
) -> None:
    chosen = configured(
        *AS_PUBLISHED, "privacy.acknowledge_unsound=true", "algorithm.rounds=1",
        "algorithm.gate=similarity",
    )  # fmt: skip
    results = carry_out(prepare(chosen), tmp_path / "run")
    claim = results["privacy"]
    assert (claim["guarantee"], claim["scope"]) == (None, "as_published")
    # as if all three had noise
    counted = PoissonSampledGaussianEvent(noise_multiplier=4.0, sample_rate=0.5, steps=2)
    assert claim["nominal_epsilon"] == pytest.approx(epsilon([counted], 1e-5))
    card = json.loads((tmp_path / "run/privacy.json").read_text())
    assert card["sentence"].startswith("NOMINAL") and card["guarantee"] is None
    assert "no differential-privacy guarantee for any record" in card["sentence"]
    assert "GUARANTEE" not in (tmp_path / "run/privacy.md").read_text()
    assert read_journal(tmp_path / "run/ledger/s0.jsonl").plan.scope == "as_published"
    replies = [reply for agent, _, _, reply in record_visits if agent in ("s0", "s1")]
    for reply in replies:
        assert None not in (reply.payload.F, reply.payload.G, reply.payload.D)
        assert reply.payload.agreement is None and reply.metrics == {}
        assert reply.payload.similarity is None
    [query] = [reply for agent, _, _, reply in record_visits if agent == "q0"]
    assert query.payload.similarity is not None  # the control
    # D is without noise and has spectral norm vectors; the card excludes buffers of G alone.
    buffers = {name: set(weights) - {key for key, _ in network.named_parameters()}
               for name, network in prepare(chosen).algorithm.networks().items()
               for weights in [getattr(replies[0].payload, name)]}  # fmt: skip
    assert buffers["D"] and not buffers["G"]
    assert any("buffers of networks trained with noise" in text for text in card["not_sent"])


CANARY = b"CANARY-7f3a9e"


def _npz_with_marked_rows(path: Path) -> None:
    """A data set in which every training row, and no test row, starts with the canary."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (90, 1, 8, 8), dtype=np.uint8)
    x[:60].reshape(60, 64)[:, : len(CANARY)] = np.frombuffer(CANARY, dtype=np.uint8)
    y = np.arange(90) % 3
    np.savez(path, x_train=x[:60], y_train=y[:60], x_test=x[60:], y_test=y[60:])


def _command(folder: Path, text: str) -> None:
    _npz_with_marked_rows(folder.parent / "marked.npz")
    path = folder.parent / "marked.yaml"
    path.write_text(text)
    given = ["data.name=npz", f"data.root={folder.parent / 'marked.npz'}", f"run.output={folder}"]
    assert train.main([str(path), *given, "algorithm.rounds=1", "--quiet"]) == 0


def _columns(folder: Path) -> set[str]:
    with (folder / "metrics.csv").open() as file:
        return set(next(csv.reader(file)))


@pytest.fixture
def plotted_agents(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """The agents whose rows were counted by class, for each picture."""
    drawn: list[set[str]] = []

    def plot(labelled: Mapping[str, Any], unlabelled: Mapping[str, Any]) -> Any:
        drawn.append({*labelled, *unlabelled})
        return np.zeros((8, 8, 3), dtype=np.uint8)

    monkeypatch.setattr(figures, "partition_plot", plot)
    return drawn


def test_a_private_run_writes_no_metric_and_no_pixel_of_labelled_rows(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], plotted_agents: list[set[str]]
) -> None:
    folder = tmp_path / "private"
    _command(folder, PRIVATE)
    of_query = {f"train/loss_{name}/query" for name in ("F", "G", "D")}
    assert {c for c in _columns(folder) if c.startswith("train/")} - of_query == {
        "train/agreement", "train/gate_open",
    }  # fmt: skip
    assert not any("support" in column for column in _columns(folder))
    assert not plotted_agents
    said = "".join(capfd.readouterr())
    as_numbers = ", ".join(str(byte) for byte in CANARY)
    written = [file for file in folder.rglob("*") if file.is_file()]
    assert len(written) > 10
    for file in written:
        content = file.read_bytes()
        assert CANARY not in content and as_numbers.encode() not in content, file
        assert b"loss_F/support" not in content, file  # a tag of TensorBoard, a line of the log
    assert CANARY.decode() not in said and as_numbers not in said


def test_the_check_of_metrics_and_pixels_detects_them_in_a_run_without_privacy(
    tmp_path: Path, plotted_agents: list[set[str]]
) -> None:
    folder = tmp_path / "plain"
    _command(folder, TINY)
    assert "train/loss_F/support" in _columns(folder)
    assert plotted_agents == [{"q0", "s0", "s1"}]
    events = b"".join(file.read_bytes() for file in (folder / "tensorboard").iterdir())
    assert b"train/loss_F/support" in events


# Randomness that no seed controls ---------------------------------------------------------------


def _weights_of_two_runs(configured: Callable[..., Config], tmp: Path, private: bool) -> list[Any]:
    for number in (1, 2):
        prepared = prepare(configured("algorithm.rounds=1", private=private))
        carry_out(prepared, tmp / str(number))
    paths = [tmp / str(number) / "classifier.safetensors" for number in (1, 2)]
    return [path.read_bytes() for path in paths]


@pytest.mark.parametrize("private", [True, False])
def test_two_runs_with_one_seed_differ_if_and_only_if_they_are_private(
    private: bool, configured: Callable[..., Config], tmp_path: Path
) -> None:
    one, other = _weights_of_two_runs(configured, tmp_path, private)
    assert (one != other) == private


def test_run_seed_changes_neither_masks_nor_noise(
    configured: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[np.ndarray] = []
    for name in ("secure_uniform", "secure_normal"):
        real = getattr(secure_noise, name)

        def record(count: int, real: Callable[[int], np.ndarray] = real) -> np.ndarray:
            drawn.append(real(count))
            return drawn[-1]

        monkeypatch.setattr(secure_noise, name, record)
    for number in (1, 2):
        carry_out(prepare(configured("algorithm.rounds=1")), tmp_path / str(number))
    numbers = np.concatenate(drawn)
    assert len(np.unique(numbers)) == len(numbers)


# Independence of rows ---------------------------------------------------------------------------


def _fields_of_one_step(
    configured: Callable[..., Config], folder: Path, counts: str, hold: slice
) -> dict[int, dict[str, Tensor]]:
    """The loss fields of each row in the first step of s0's visit: row id -> fields.

    Row ids are positions among the rows of the agent, as at a site that reads its rows from a file.
    """
    prepared = prepare(
        configured("privacy.sample_rate=1.0", "privacy.steps=1", "privacy.views=2",
                   f"privacy.record_counts={counts}")
    )  # fmt: skip
    seen: dict[int, dict[str, Tensor]] = {}

    def look(self: Any, rows: int, fields_of: Any, row_loss: Any, **_: int) -> None:
        fields = fields_of(torch.arange(rows), 0)
        for place, number in enumerate(ids):
            seen[number] = {name: value[place] for name, value in fields.items()}

    [agent, *_] = prepared.labelled_agents
    rows = agent.labelled
    ids = rows.ids[hold].tolist()
    agent.held_labelled = LabelledRows(rows.x[hold], rows.y[hold], torch.arange(len(ids)))
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch, accounts(prepared, folder):
        patch.setattr(PrivateTraining, "run", look)
        visit(prepared, agent, context("s0"))
    return seen


def test_with_private_counts_adding_a_row_leaves_the_draws_of_all_other_rows_unchanged(
    configured: Callable[..., Config], tmp_path: Path
) -> None:
    # Otherwise neighbours differ in the gradient of every row, and clipping gives no bound.
    whole = _fields_of_one_step(configured, tmp_path / "1", "private", slice(None))
    fewer = _fields_of_one_step(configured, tmp_path / "2", "private", slice(3, None))
    assert len(whole) == 12 and len(fewer) == 9
    assert all(equal(whole[number], fewer[number]) for number in fewer)
    drawn = {fields["z"].numpy().tobytes() for fields in whole.values()}
    assert len(drawn) == 12  # and every row has its own draws
    # The control: with public counts neighbours have equal counts, and draws go by position.
    whole = _fields_of_one_step(configured, tmp_path / "3", "public", slice(None))
    fewer = _fields_of_one_step(configured, tmp_path / "4", "public", slice(3, None))
    assert not any(equal(whole[number], fewer[number]) for number in fewer)


def _shift_of_the_others(
    configured: Callable[..., Config], folder: Path, counts: str, *overrides: str
) -> float:
    """How far the clipped sum of the other rows moves when a row that adds nothing is drawn too."""
    prepared = prepare(
        configured(
            "privacy.sample_rate=0.5", "privacy.steps=1", "privacy.views=2", *overrides,
            "privacy.augment=strong", f"privacy.record_counts={counts}",
        )
    )  # fmt: skip
    [agent, *_] = prepared.labelled_agents
    rows = agent.labelled
    x = rows.x.float().div(255) if rows.x.dtype == torch.uint8 else rows.x.clone()
    x[0] = math.nan  # its gradient is not finite, so it counts as zero
    agent.held_labelled = LabelledRows(x, rows.y, rows.ids)
    mask = torch.arange(len(rows)) % 2 == 1
    algorithm, told, sums = prepared.algorithm, make_request(prepared), []
    assert isinstance(algorithm, FedSSL)
    for first in (False, True):
        mask = mask.clone()
        mask[0] = first
        here = folder / str(first)
        here.mkdir(parents=True)
        with pytest.MonkeyPatch.context() as patch, accounts(prepared, here):
            patch.setattr(PrivatePlan, "draw_batch", lambda *_, mask=mask: mask)
            without_noise(patch)
            sent = algorithm.support_pass(agent, told, context("s0"))
        assert isinstance(sent, FedSSLUpdate) and sent.F is not None
        sums.append(torch.cat([w.flatten().double() for w in sent.F.values()]))
    return float((sums[1] - sums[0]).norm())


@pytest.mark.parametrize("counts", ["public", "private"])
def test_whether_a_row_is_drawn_changes_no_gradient_of_another_row(
    configured: Callable[..., Config], tmp_path: Path, counts: str
) -> None:
    # Otherwise a batch reveals its members, and sampling amplifies nothing.
    assert _shift_of_the_others(configured, tmp_path, counts) < 1e-5


def test_the_check_of_gradients_detects_draws_by_position_in_the_batch(
    configured: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = PrivateTraining.run

    def by_place(self: Any, rows: int, fields_of: Any, row_loss: Any, **how: int) -> None:
        def fields(picked: Tensor, step: int) -> Any:
            drawn, own = fields_of(torch.arange(len(picked)), step), fields_of(picked, step)
            return {**drawn, "p1": own["p1"], "strong": own["strong"].flip(0)}

        real(self, rows, fields, row_loss, **how)

    monkeypatch.setattr(PrivateTraining, "run", by_place)
    # With public counts rows keep their positions.
    assert _shift_of_the_others(configured, tmp_path, "private") > 1e-3


def test_the_number_of_rows_per_microbatch_follows_from_public_sizes(
    configured: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, given = [], []

    def record(networks: Mapping[str, Any], numbers: int) -> int:
        sizes.append((list(networks), numbers))
        return 7

    monkeypatch.setattr("privssl.privacy.local_dp_sgd.choose_max_microbatch_size", record)
    monkeypatch.setattr(
        PrivateTraining, "run", lambda *_, max_microbatch_size: given.append(max_microbatch_size)
    )
    prepared = prepare(configured("privacy.views=2"))
    assert given.pop() == 7  # in the check before the run
    [agent, *_] = prepared.labelled_agents
    with accounts(prepared, tmp_path):
        visit(prepared, agent, context("s0"))
    assert sizes == [(["F"], 2 * 1 * 8 * 8)] * 2
    assert given == [7]


def test_rows_after_the_first_block_have_their_own_draws(
    configured: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("privssl.privacy.local_dp_sgd.BLOCK", 4)
    fields = _fields_of_one_step(configured, tmp_path / "1", "public", slice(None))
    assert len({row["z"].numpy().tobytes() for row in fields.values()}) == 12
