"""The forecast of a dry run: bytes, disk and times; it leaves no files and no charges."""

import dataclasses
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from privssl.algorithms.baselines.supervised import FedAvg
from privssl.core.agents import Agent, AgentLocation, LabelledRows
from privssl.experiment.config import load_config
from privssl.experiment.prepare import Prepared, prepare
from privssl.runs import dry_run, forecast
from tests.support.command_line import PLAIN, command, tree

#: Algorithms with different traffic: phases, a warm-up, a labelled server, memories.
RUNS = {
    "fedssl": PLAIN,
    "fedavg": """\
data: {name: toy, labels: labels-at-client, labelled: 40, unlabelled: 80}
agents: {mixed: 4}
algorithm: {name: fedavg, rounds: 3, local_epochs: 1}
""",
    "fedsem": """\
data: {name: toy, labels: labels-at-client, labelled: 40, unlabelled: 80}
agents: {mixed: 4}
algorithm: {name: fedsem, rounds: 5, warm_up: 2, local_epochs: 1}
""",
    "fedseal": """\
data: {name: toy, labels: labels-at-server, labelled: 40, unlabelled: 80}
agents: {query: 4}
algorithm: {name: fedseal, rounds: 4, validation_rows: 10, client_epochs: 1}
""",
    "label_census": """\
data: {name: toy, labelled: 40, unlabelled: 80}
agents: {support: 2, query: 2}
algorithm: {name: label_census, cluster_rounds: 5, vote_rounds: 2, self_training_rounds: 3}
privacy: {epsilon: 2.0, delta: 1.0e-4}
""",
}
PRIVATE = (
    PLAIN
    + """\
privacy: {epsilon: 4.0, delta: 1.0e-3, sample_rate: 0.5, steps: 4, visits: 2, learning_rate: 0.1}
"""
)


def prepare_text(folder: Path, text: str, *overrides: str) -> Prepared:
    """Prepare a run from a config in a folder."""
    path = folder / "tiny.yaml"
    path.write_text(text)
    return prepare(load_config(path, [*overrides, f"run.output={folder / 'run'}"]))


@pytest.mark.fast_cases("fedavg", "fedssl")
@pytest.mark.parametrize("name", RUNS)
def test_the_forecast_of_rounds_bytes_and_disk_equals_a_real_run(name: str, tmp_path: Path) -> None:
    estimate = forecast.forecast(prepare_text(tmp_path, RUNS[name]))

    assert command(tmp_path / "tiny.yaml", f"run.output={tmp_path / 'run'}", "--quiet").status == 0
    results = json.loads((tmp_path / "run/results.json").read_text())
    assert estimate.rounds == results["rounds"]
    assert estimate.total_bytes == (results["bytes"]["up"], results["bytes"]["down"])
    last = tmp_path / "run/checkpoints" / (tmp_path / "run/checkpoints/latest").read_text().strip()
    written = sum(file.stat().st_size for file in last.glob("*.safetensors"))
    # Files also contain headers with the names of tensors.
    assert written * 0.8 <= estimate.snapshot_bytes + 20_000
    assert estimate.snapshot_bytes <= written
    everything = sum(f.stat().st_size for f in (tmp_path / "run/checkpoints").rglob("*.saf*"))
    assert estimate.disk_bytes >= everything - 60_000


def test_control_a_forecast_from_the_warm_up_alone_is_too_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = forecast.forecast(prepare_text(tmp_path, RUNS["fedssl"])).total_bytes
    all_sampled = forecast.sampled_rounds
    monkeypatch.setattr(
        forecast, "sampled_rounds", lambda algorithm: [(next(all_sampled(algorithm))[0], 3)]
    )
    assert forecast.forecast(prepare_text(tmp_path, RUNS["fedssl"])).total_bytes < right


@pytest.mark.parametrize("name", RUNS)
def test_the_sampled_rounds_represent_every_round_exactly_once(name: str, tmp_path: Path) -> None:
    algorithm = prepare_text(tmp_path, RUNS[name]).algorithm
    sampled = list(forecast.sampled_rounds(algorithm))
    covered = [n for now, count in sampled for n in range(now.number, now.number + count)]
    assert covered == list(range(1, sum(phase.rounds for phase in algorithm.phases()) + 1))
    begins = {now.number for now, _ in sampled}
    assert 1 in begins
    if name in ("fedssl", "fedsem"):
        assert algorithm.cfg.warm_up + 1 in begins


@pytest.mark.usefixtures("costs_of_users")
def test_the_forecast_multiplies_visit_times_by_agents_and_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, real, now = [], FedAvg.labelled_pass, [0.0]

    @functools.wraps(real)
    def labelled_pass(self: Any, agent: Any, message: Any, ctx: Any) -> Any:
        seen.append(agent.id)
        now[0] += 0.05  # independent of the speed of the machine
        return real(self, agent, message, ctx)

    monkeypatch.setattr(FedAvg, "labelled_pass", labelled_pass)
    monkeypatch.setattr(forecast, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    prepared = prepare_text(tmp_path, RUNS["fedavg"], "run.workers=1", "algorithm.rounds=20")
    estimate = forecast.forecast(prepared)

    assert set(seen) == {estimate.visits[0].agent}  # one agent was timed
    assert len(seen) <= 9  # not in every round
    assert estimate.visits[0].seconds == pytest.approx(0.05)
    assert estimate.round_seconds == pytest.approx(4 * 0.05)
    assert estimate.total_seconds == pytest.approx(20 * 4 * 0.05)
    halved = forecast.forecast(
        prepare_text(tmp_path, RUNS["fedavg"], "run.workers=2", "algorithm.rounds=20")
    )
    assert halved.round_seconds == pytest.approx(estimate.round_seconds / 2)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("text", "overrides", "unit"),
    [
        (RUNS["fedavg"], ["data.unlabelled=800", "data.labelled=200", "agents.mixed=1"], "rows"),
        (RUNS["fedssl"], ["algorithm.local_steps=6"], "steps"),
        (PRIVATE, ["privacy.steps=6"], "private steps"),
    ],
)
def test_a_long_visit_is_timed_in_part_and_the_output_says_so(
    text: str, overrides: Sequence[str], unit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = prepare_text(tmp_path, text, *overrides)
    monkeypatch.setattr(forecast, "LEAST", 60.0)
    whole = forecast.forecast(prepared)
    assert all(visit.timed == visit.whole for visit in whole.visits)  # the control

    monkeypatch.setattr(forecast, "LEAST", 0.0)
    monkeypatch.setattr(forecast, "SHARE", 0.0)
    monkeypatch.setattr(forecast, "FEW_ROWS", 64)
    part = forecast.forecast(prepared)
    visit = next(visit for visit in part.visits if visit.unit == unit)
    assert visit.timed < visit.whole
    assert f"from {visit.timed} of {visit.whole} {unit}" in "\n".join(dry_run.lines_of(part))
    assert part.total_bytes == whole.total_bytes  # messages keep their full shapes


class UnreadableRows(LabelledRows):
    """Labelled rows that raise AssertionError when read."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("x", "y"):
            raise AssertionError("a labelled row was read")
        return super().__getattribute__(name)


def with_unreadable_rows(prepared: Prepared) -> Prepared:
    for agent in prepared.federated_data.agents:
        if (rows := agent.held_labelled) is not None:
            agent.held_labelled = UnreadableRows(rows.x, rows.y, rows.ids)
    return prepared


def test_a_private_visit_is_timed_on_invented_rows_without_a_charge_or_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    for text in (PRIVATE, RUNS["label_census"]):
        prepared = with_unreadable_rows(prepare_text(tmp_path, text))
        before = tree(tmp_path)
        estimate = forecast.forecast(prepared)
        assert {visit.role for visit in estimate.visits} == {"support", "query"}
        assert {visit.role for visit in estimate.visits if visit.made_up} == {"support"}
        assert all(agent.account is None for agent in prepared.federated_data.agents)
        assert all(not agent.memory for agent in prepared.federated_data.agents)
        assert tree(tmp_path) == before
        assert list(temporary.iterdir()) == []

    with pytest.raises(AssertionError, match="a labelled row was read"):  # the control
        forecast.forecast(with_unreadable_rows(prepare_text(tmp_path, RUNS["fedssl"])))


def test_the_choice_of_the_timed_agent_does_not_depend_on_private_row_counts() -> None:
    def agents(*rows: int) -> list[Agent]:
        return [
            Agent(id=f"s{n}", location=AgentLocation.EDGE, held_labelled=LabelledRows(
                torch.zeros(count, 1), torch.zeros(count), torch.arange(count)))
            for n, count in enumerate(rows)
        ]  # fmt: skip

    all_ids = {"s0", "s1", "s2"}
    timed = [
        forecast._choose_typical(agents(*rows), all_ids).id
        for rows in ((1, 2, 3), (9, 8, 7), (5, 9, 1))
    ]
    assert len(set(timed)) == 1
    assert (
        forecast._choose_typical(agents(5, 9, 1), set()).id == "s0"
    )  # the control: public row counts are used


def test_a_dry_run_continues_without_an_estimate_if_timing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny.yaml").write_text(PRIVATE)

    def raise_disk_full(*_: Any, **__: Any) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.mkdtemp", raise_disk_full)
    outcome = command(tmp_path / "tiny.yaml", "--dry-run")
    assert outcome.status == 0
    assert "cannot be estimated: [Errno 28] No space left on device" in outcome.out
    monkeypatch.undo()
    assert "cannot be estimated" not in command(tmp_path / "tiny.yaml", "--dry-run").out


def test_a_dry_run_prints_its_estimate_as_json_and_writes_no_file(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(PLAIN)
    outcome = command(tmp_path / "tiny.yaml", "--dry-run", "--json")
    estimate = json.loads(outcome.out)["estimate"]
    assert estimate["rounds"] == 3
    assert estimate["total_bytes"][0] > 0
    assert "A round: about" in outcome.err
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.yaml"]


def test_a_dry_run_prints_the_classes_of_each_agent_unless_the_run_is_private(
    tmp_path: Path,
) -> None:
    prepared = prepare_text(tmp_path, PLAIN)
    outcome = command(tmp_path / "tiny.yaml", "--dry-run")
    for agent in prepared.federated_data.agents:
        labels, unlabelled = torch.zeros(10, dtype=torch.long), torch.zeros(10, dtype=torch.long)
        if agent.held_labelled is not None:
            labels = agent.held_labelled.y.bincount(minlength=10)
        if agent.held_unlabelled is not None:
            truth = prepared.federated_data.true_labels[agent.held_unlabelled.ids]
            unlabelled = truth.bincount(minlength=10)
        cells = [f"{a}+{b}" for a, b in zip(labels.tolist(), unlabelled.tolist(), strict=True)]
        assert any(line.split() == [agent.id, *cells] for line in outcome.out.splitlines())
    (tmp_path / "tiny.yaml").write_text(PRIVATE)
    assert "+" not in command(tmp_path / "tiny.yaml", "--dry-run").out.replace("e+", "")


def test_a_dry_run_compares_a_users_split_with_the_one_the_config_would_draw(
    tmp_path: Path,
) -> None:
    prepared = prepare_text(tmp_path, PLAIN)
    path = tmp_path / "own.json"
    prepared.federated_data.manifest.write(path)
    config = tmp_path / "tiny.yaml"
    assert (
        "is the split that the config would draw"
        in command(config, "--dry-run", f"data.split={path}").out
    )
    other = command(config, "--dry-run", f"data.split={path}", "run.seed=1").out
    assert "differs from the split that the config would draw (run.seed 1)" in other

    manifest = prepared.federated_data.manifest
    held = dict(manifest.agents)
    held["q0"], held["q1"] = (
        dataclasses.replace(held["q0"], unlabelled=held["q1"].unlabelled),
        dataclasses.replace(held["q1"], unlabelled=held["q0"].unlabelled),
    )
    dataclasses.replace(manifest, agents=held).write(path)
    swapped = command(config, "--dry-run", f"data.split={path}").out
    assert "80 of 1000 training rows are held elsewhere" in swapped

    config.write_text(PRIVATE)
    assert "not compared" in command(config, "--dry-run", f"data.split={path}").out
    assert "data.split" not in command(config, "--dry-run").out.partition("\n\n")[2]
