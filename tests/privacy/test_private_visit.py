"""One private visit of FedSSL: what it moves, what it sends, and what it is charged.

Nulling or removing a row moves what is released by at most the clipping norm. Messages contain
protected parameters only. Batches may be empty. The charged event matches the sampler and the
noise. A visit is charged once.
"""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from accounting.errors import LedgerError
from accounting.events import (
    PoissonSampledGaussianEvent,
)
from accounting.ledger import read_journal
from privssl.algorithms import ALGORITHMS
from privssl.algorithms.fedssl import losses
from privssl.algorithms.fedssl.algorithm import FedSSL, FedSSLUpdate
from privssl.core.agents import LabelledRows
from privssl.core.engine import Call
from privssl.core.messages import Declined
from privssl.engines.local import LocalEngine
from privssl.errors import DataError, PrivacyError
from privssl.experiment import config
from privssl.experiment.config import Config
from privssl.experiment.prepare import prepare
from privssl.privacy import secure_noise
from privssl.privacy.noisy_optimizer import SecureNoiseOptimizer
from privssl.privacy.plan import PrivatePlan
from privssl.privacy.secure_noise import secure_normal
from privssl.runs import checkpoint, round_loop
from privssl.settings.schema import ModelSettings
from tests.support.privacy import (
    draw_rows,
    networks,
    repeats,
    shipped_classifiers,
)
from tests.support.private_fedssl import accounts, carry_out, context, make_request, sealed, visit
from tests.support.private_visit import (
    ALL,
    CLIP,
    ONE_STEP,
    header,
    tensor_names,
    visit_with,
    with_row,
    without_row,
)


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The distance between two neighbours' sums, in clipping norms."""
    apart = torch.cat([(one[key].double() - other[key].double()).flatten() for key in one])
    return float(apart.norm()) / 1000 * 12 / CLIP  # learning rate, public divisor


@pytest.mark.usefixtures("no_noise")
@pytest.mark.parametrize("protect", ["F", "FG", "FDG"])
@pytest.mark.parametrize("value", [0.3, 1e15])
def test_nulling_a_row_moves_the_released_parameters_by_at_most_the_clip_norm(
    protect: str, value: float, configured: Callable[..., config.Config], tmp_path: Path
) -> None:
    named = f"[{', '.join(protect)}]"
    chosen = (f"privacy.update_at_support={named}", f"privacy.protect={named}")
    prepared = prepare(configured(*ONE_STEP, *chosen))
    came = make_request(prepared)
    whole = visit_with(prepared, tmp_path / "1", with_row(value), came)
    nulled = visit_with(prepared, tmp_path / "2", with_row(math.nan), came)
    assert distance(whole, nulled) <= 1 + 1e-4
    if value == 0.3:
        assert distance(whole, nulled) > 0.5  # such a row is clipped, so the bound is reached


@pytest.mark.usefixtures("no_noise")
@pytest.mark.parametrize(("counts", "bounded"), [("private", True), ("public", False)])
def test_with_private_counts_removing_a_row_moves_the_release_by_at_most_the_clip_norm(
    counts: str, bounded: bool, configured: Callable[..., config.Config], tmp_path: Path
) -> None:
    # The negative control: with public counts, removing a row changes the draws of the rows after
    # it. The sum moves by more than one clipping norm.
    prepared = prepare(configured(*ONE_STEP, *ALL, f"privacy.record_counts={counts}"))
    came = make_request(prepared)
    whole = visit_with(prepared, tmp_path / "1", lambda rows: rows, came)
    fewer = visit_with(prepared, tmp_path / "2", without_row, came)
    assert (distance(whole, fewer) <= 1 + 1e-4) == bounded


# What a sound visit sends -----------------------------------------------------------------------


# Layers without norms also occur in networks with norms, so the rest of the grid is slow.
@pytest.mark.fast_cases(3)
@pytest.mark.parametrize(
    "model",
    [
        pytest.param(m, marks=pytest.mark.slow if m.norm == "none" else (), id=f"{m.name}-{m.norm}")
        for m in shipped_classifiers()
    ],
)
def test_no_network_that_can_be_protected_has_a_buffer(
    model: ModelSettings, configured: Callable[..., config.Config]
) -> None:
    chosen = (f"model.name={model.name}", f"model.norm={model.norm}")
    nets = prepare(configured(*ALL, *chosen)).algorithm.networks()
    assert [name for name, net in nets.items() if list(net.buffers())] == []
    assert list(networks(spectral=True)["D"].buffers())  # the control: a buffer is detected


def test_a_sound_visit_sends_its_parameters_with_weight_one_and_no_metrics(
    configured: Callable[..., config.Config], tmp_path: Path
) -> None:
    two = ("privacy.update_at_support=[F, G]", "privacy.protect=[F, G]")
    prepared = prepare(configured(*two))
    assert isinstance(prepared.algorithm, FedSSL)
    with accounts(prepared, tmp_path) as agents:
        engine = LocalEngine(list(agents.values()), seed=0, device=torch.device("cpu"))
        step = prepared.algorithm.support_pass
        [reply] = list(engine.deliver([Call(agents["s0"].ref, step, make_request(prepared), 1)]))
    assert (reply.weight, dict(reply.metrics)) == (1.0, {})
    nets = prepared.algorithm.networks()
    expected = {f"{n}/{key}" for n in ("F", "G") for key, _ in nets[n].named_parameters()}
    assert tensor_names(reply.payload) == expected
    fields = json.loads(header(reply.payload)["__metadata__"]["fields"])
    names = {n: [k.partition("/")[2] for k in expected if k[0] == n] for n in ("F", "G")}
    assert {n: sorted(fields[n]["state_dict"]) for n in ("F", "G")} == {
        n: sorted(keys) for n, keys in names.items()
    }
    assert {k: v for k, v in fields.items() if k not in ("F", "G")} == {
        "D": None,
        "agreement": None,
        "similarity": None,
    }


# Empty and full batches -------------------------------------------------------------------------


def test_a_visit_in_which_no_row_was_drawn_is_charged_and_sends_its_noise(
    configured: Callable[..., config.Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw_rows(monkeypatch, [False] * 12)
    monkeypatch.setattr(secure_noise, "secure_normal", np.ones)
    prepared = prepare(configured("privacy.learning_rate=1.0", "privacy.average_last=0.0"))
    came = make_request(prepared)
    with accounts(prepared, tmp_path) as agents:
        sent = visit(prepared, agents["s0"], context("s0"))
        account = agents["s0"].account
        assert account is not None and account.visits() == 1 and account.spent() > 0
    assert isinstance(sent, FedSSLUpdate) and sent.F is not None
    # Two steps of noise 4.0 x clip norm 1 x 1, each divided by the public 0.5 x 12 rows.
    for key, value in sent.F.items():
        torch.testing.assert_close(came.F[key] - value, torch.full_like(value, 8 / 6))


@pytest.mark.parametrize("rows", [0, 1])
def test_an_agent_with_one_row_or_none_takes_all_its_steps(
    rows: int, configured: Callable[..., config.Config], tmp_path: Path
) -> None:
    prepared = prepare(configured("privacy.record_counts=private"))
    came = make_request(prepared)

    def first(held: LabelledRows) -> LabelledRows:
        return LabelledRows(held.x[:rows], held.y[:rows], held.ids[:rows])

    sent = visit_with(prepared, tmp_path / "visit", first, came)
    assert all(bool(value.isfinite().all()) for value in sent.values())
    assert all(not torch.equal(value, came.F[key[2:]]) for key, value in sent.items())
    assert len(read_journal(tmp_path / "visit/s0.jsonl").visits) == 1


@pytest.mark.parametrize(("parts", "refused"), [(("FG",), False), (("F", "G"), True)])
def test_networks_trained_one_after_the_other_are_two_mechanisms_under_one_charge(
    parts: tuple[str, ...], refused: bool, configured: Callable[..., config.Config],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    both = ("privacy.update_at_support=[F, G]", "privacy.protect=[F, G]", "privacy.steps=1")
    prepared = prepare(configured(*both))
    trained = losses.train_networks_privately

    def in_turn(plan: PrivatePlan, *given: Any, **named: Any) -> None:
        for nets in map(tuple, parts):
            trained(replace(plan, update=nets, protect=nets), *given, **named)

    monkeypatch.setattr(losses, "train_networks_privately", in_turn)
    with accounts(prepared, tmp_path) as agents:
        assert isinstance(prepared.algorithm, FedSSL)
        call = Call(agents["s0"].ref, prepared.algorithm.support_pass, make_request(prepared), 1)
        engine = LocalEngine([agents["s0"]], seed=0, device=prepared.device)
        if refused:
            with pytest.raises(PrivacyError, match="uses rows twice in one step"):
                list(engine.deliver([call]))
        else:
            [reply] = engine.deliver([call])
            assert reply.payload.F and reply.payload.G


def test_an_agent_without_labelled_rows_has_no_account_and_gets_no_visit(
    configured: Callable[..., config.Config],
) -> None:
    prepared = prepare(configured())
    assert (
        {agent.id for agent in prepared.labelled_agents}
        == set(prepared.account_plans)
        == {"s0", "s1"}
    )
    assert all(agent.account is None for agent in prepared.federated_data.agents)


# Noise ------------------------------------------------------------------------------------------


def test_two_resumes_from_one_checkpoint_draw_different_noise(
    configured: Callable[..., config.Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, real = configured("algorithm.rounds=2"), FedSSL.round
    digest, begun = config.config_hash(chosen), tmp_path / "run"
    begun.mkdir()

    def stop_in_round_two(self: Any, state: Any, federation: Any) -> Any:
        if federation.round.number == 2:
            raise KeyboardInterrupt
        return real(self, state, federation)

    with monkeypatch.context() as patch:
        patch.setattr(FedSSL, "round", stop_in_round_two)
        round_loop.train(prepare(chosen), begun, list, None)
    drawn: dict[str, list[NDArray[np.float64]]] = {"ours": [], "seeded": []}
    for kind, folder in ((kind, tmp_path / f"{kind}{n}") for kind in drawn for n in (1, 2)):
        shutil.copytree(begun, folder)
        seeded = np.random.default_rng(0)  # like one from a checkpoint

        def draw(
            count: int, kind: str = kind, seeded: np.random.Generator = seeded
        ) -> NDArray[np.float64]:
            numbers = secure_normal(count) if kind == "ours" else seeded.standard_normal(count)
            drawn[kind].append(numbers)
            return numbers

        with monkeypatch.context() as patch:
            patch.setattr(secure_noise, "secure_normal", draw)
            snapshot = checkpoint.load_snapshot(folder / "checkpoints", digest)
            round_loop.train(prepare(chosen), folder, list, snapshot)
    assert len(drawn["ours"]) == 8 and repeats(drawn["ours"]) == 0
    assert repeats(drawn["seeded"]) == sum(map(len, drawn["seeded"])) / 2  # the control


#


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("left", [slice(1, None), slice(0, 0)], ids=["one less", "none"])
def test_with_private_counts_a_split_with_other_counts_than_declared_runs_as_usual(
    left: slice, configured: Callable[..., config.Config], tmp_path: Path
) -> None:
    private = "privacy.record_counts=private"
    whole = prepare(configured(private))
    split = whole.federated_data.manifest
    held = split.agents["s0"]
    fewer = replace(held, labelled=held.labelled[left])
    replace(split, agents={**split.agents, "s0": fewer}).write(tmp_path / "fewer.json")
    given = f"data.split={tmp_path / 'fewer.json'}"
    neighbour = prepare(configured(private, given))
    assert [len(agent.labelled) for agent in neighbour.labelled_agents] == [
        len(held.labelled[left]), 12
    ]  # fmt: skip
    assert neighbour.account_plans == whole.account_plans
    assert neighbour.roster == whole.roster
    results = carry_out(neighbour, tmp_path / "run")
    assert (results["labels"], results["status"]) == (24, "finished")
    # The control: public counts are checked.
    with pytest.raises(DataError, match="labelled rows"):
        prepare(configured(given))


def test_every_private_algorithm_is_listed_in_these_tests() -> None:
    # Another one needs these tests for its own private pass. FedAvg has them in
    # test_private_fedavg.py; the census in test_label_histogram.py, test_histogram_attack.py and
    # test_label_census.py.
    private = {name: kind.mechanism for name, kind in ALGORITHMS.items() if kind.can_be_private}
    assert private == {"fedssl": "dp-sgd", "fedavg": "dp-sgd", "label_census": "census"}


STEPS, RATE, NOISE = 40, 0.5, 4.0  # half the rate is missed with probability 1e-8


def event_mismatches(config: Config, folder: Path) -> list[str]:
    """Where the charged event of a real visit differs from its sampler and its noise."""
    prepared = prepare(config)
    happened: list[str] = []
    masks: list[tuple[bool, ...]] = []
    noise: list[np.ndarray] = []
    draw, add = PrivatePlan.draw_batch, SecureNoiseOptimizer.add_noise

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
        patch.setattr(SecureNoiseOptimizer, "add_noise", adds)
        assert not isinstance(visit(prepared, agents["s0"], context("s0")), Declined)
    [event] = read_journal(folder / "s0.jsonl").events
    assert isinstance(event, PoissonSampledGaussianEvent) and isinstance(prepared.plan, PrivatePlan)
    deviation = float(np.concatenate(noise).std()) / prepared.plan.clip_norm
    rate = float(np.mean(masks))
    problems = []
    if happened != ["batch", "noise"] * event.steps:
        problems.append("releases")
    if len(set(masks)) < len(masks) / 2:  # two of 2^12 masks are rarely equal
        problems.append("batches are not fresh")
    if abs(deviation / event.noise_multiplier - 1) > 0.05:  # of thousands of numbers
        problems.append("noise")
    if abs(rate - event.sample_rate) > 5 * math.sqrt(RATE * (1 - RATE) / np.size(masks)):
        problems.append("rate")
    return problems


def repeat_first_batch(draw: Any) -> Any:
    """A sampler that draws once and then repeats that batch."""
    kept: list[torch.Tensor] = []

    def draws(self: PrivatePlan, rows: int) -> torch.Tensor:
        kept[:] = kept or [draw(self, rows)]
        return kept[0]

    return draws


def half_the_noise(count: int) -> np.ndarray:
    return 0.5 * np.random.default_rng().standard_normal(count)


#: What is replaced -> the mismatches to be found.
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
        repeat_first_batch(PrivatePlan.draw_batch),
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
def test_the_charged_event_matches_the_sampler_and_the_noise(
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

    problems = event_mismatches(config, tmp_path)

    # A repeated batch may have a rate that is far off by chance.
    assert set(noticed) <= set(problems) <= {*noticed, *(["rate"] if noticed else [])}


def test_a_server_that_repeats_a_finished_visit_gets_no_second_gradient(
    configured: Callable[..., Config], tmp_path: Path
) -> None:
    prepared = prepare(configured())
    with accounts(prepared, tmp_path) as agents:
        agent = agents["s0"]
        assert not isinstance(visit(prepared, agent, context("s0", key="1")), Declined)
        paid = (tmp_path / "s0.jsonl").read_bytes()
        sealed(prepared)

        with pytest.raises(LedgerError, match=r"s0: already spent for visit .* nothing was read"):
            visit(prepared, agent, context("s0", key="1"))

        assert (tmp_path / "s0.jsonl").read_bytes() == paid
        # The control: a visit with another key is charged, and reads rows.
        with pytest.raises(AssertionError, match="a labelled row was read"):
            visit(prepared, agent, context("s0", key="2"))
