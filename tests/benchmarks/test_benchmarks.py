"""Benchmarks behind numbers of the docs measure what they claim to measure."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import (
    census_curve,
    census_map,
    epsilon_figure,
    rounds,
    sites_memory,
    synthetic_classifier,
    uneven_split,
)
from benchmarks.batched_agents import Measured
from benchmarks.epsilon_figure import Point, points_of
from privssl.data.datasets import load_dataset
from privssl.data.split_manifest import Manifest
from privssl.errors import UserError
from privssl.experiment.config import load_config
from privssl.experiment.prepare import Prepared, prepare
from tests.api.digits import PLAIN
from tests.support.command_line import command

CONFIG = Path(__file__).parents[2] / "configs" / "label_census.yaml"
SMALL = [
    "data.unlabelled=200", "algorithm.filters=8",
    "algorithm.cells=20", "algorithm.cluster_rounds=3", "algorithm.vote_rounds=1",
    "algorithm.self_training_rounds=1", "algorithm.local_steps=2",
]  # fmt: skip


@pytest.mark.slow
def test_a_census_on_a_shared_map_ends_where_a_whole_run_ends(tmp_path: Path) -> None:
    # Without noise both depend on the seed only, so they agree in every row. The second epsilon
    # shows that the first leaves nothing behind; the second case has other labels.
    endless, one = float("inf"), "agents.support=1"
    told = census_curve.measure(
        load_config(CONFIG, SMALL),
        [endless, 1.0, endless],
        {one: load_config(CONFIG, [*SMALL, one])},
    )
    finals = []
    for number, case in enumerate(([], [one])):
        run = tmp_path / str(number)
        trained = command(CONFIG, *SMALL, *case, "privacy=null", f"run.output={run}", "--quiet")
        assert trained.status == 0, trained.err
        finals.append(json.loads((run / "results.json").read_text())["test_accuracy"]["final"])
    assert [told[n]["test"] for n in (0, 2, 3)] == [finals[0], finals[0], finals[1]]
    assert [record.get("also") for record in told] == [None] * 3 + [one] * 3
    # the control: with other query agents the map differs
    other = load_config(CONFIG, [*SMALL, "agents.query=5"])
    with pytest.raises(UserError, match="unlabelled rows are with other agents"):
        census_curve.measure(load_config(CONFIG, SMALL), [endless], {"agents.query=5": other})


def test_runs_become_points_with_or_without_a_claim(tmp_path: Path) -> None:
    curve = tmp_path / "curve.json"
    curve.write_text(json.dumps([
        {"labels": 100, "epsilon": 2.0, "test": 0.96},
        {"labels": 100, "epsilon": float("inf"), "test": 0.97},
    ]))  # fmt: skip
    assert list(points_of(curve)) == [
        Point("label census", 100, 2.0, False, 0.96),
        Point("label census, no noise", 100, None, False, 0.97),
    ]
    run = tmp_path / "run"
    run.mkdir()
    claim = {"guarantee": None, "nominal_epsilon": 7.9}
    results = {
        "algorithm": "fedssl",
        "labels": 100,
        "privacy": claim,
        "test_accuracy": {"final": 0.9},
    }
    (run / "results.json").write_text(json.dumps(results))
    (run / "config.yaml").write_text("privacy: {update_at_support: [F, G, D], protect: [G]}\n")
    [nominal] = points_of(run)
    assert nominal == Point("fedssl-dp, as published (NOMINAL)", 100, 7.9, True, 0.9)


def test_a_figure_shows_mean_deviation_and_worst_of_each_point(tmp_path: Path) -> None:
    points = [Point("m", 100, 1.0, False, value) for value in (0.90, 0.94)]
    picture = tmp_path / "figure.png"
    lines = epsilon_figure.draw([*points, Point("n", 300, None, False, 0.5)], picture)
    assert "| m | 100 | 1 | 2 | 0.9200 | 0.0283 | 0.9000 |" in lines
    assert "| n | 300 | - | 1 | 0.5000 | 0.0000 | 0.5000 |" in lines
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_folders_that_are_no_runs_are_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert epsilon_figure.main([str(tmp_path / "figure.png"), str(tmp_path)]) == 2
    assert f"{tmp_path}: no finished run" in capsys.readouterr().err


def test_an_uneven_split_has_the_limited_labels_of_a_class_and_all_of_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "split.json"
    assert uneven_split.main([str(CONFIG), str(file), "3=0", "8=5", "data.unlabelled=200"]) == 0
    overrides = capsys.readouterr().out.split()
    federated_data = prepare(load_config(CONFIG, ["data.unlabelled=200"])).federated_data
    fewer = prepare(load_config(CONFIG, ["data.unlabelled=200", *overrides])).federated_data

    def counts(split: Manifest) -> list[list[int]]:
        held = [holding.labelled for holding in split.agents.values() if holding.labelled]
        return [
            torch.bincount(federated_data.true_labels[list(rows)], minlength=10).tolist()
            for rows in held
        ]

    before, after = counts(federated_data.manifest), counts(fewer.manifest)
    for one, other in zip(before, after, strict=True):
        assert [n for c, n in enumerate(one) if c not in (3, 8)] == [
            n for c, n in enumerate(other) if c not in (3, 8)
        ]
    assert [held[3] for held in after] == [0, 0]
    assert sorted(held[8] for held in after) == [2, 3]
    for agent, holding in federated_data.manifest.agents.items():
        assert fewer.manifest.agents[agent].unlabelled == holding.unlabelled


@pytest.mark.slow
def test_the_map_tables_are_computed_from_rows_with_known_clusters() -> None:
    # Two classes far apart: clusters are pure, and a census with little noise labels them all.
    rows = census_map.Rows.__new__(census_map.Rows)
    side = torch.arange(80) % 2
    angle = torch.where(side == 0, 0.0, torch.pi) + torch.arange(80) / 400
    rows.points, rows.truth = torch.stack([angle.cos(), angle.sin()], dim=1), side
    rows.classes, rows.cells, rows.purity, rows.labels, rows.support = 2, 8, 0.9, 40, 2
    assert "| 8 cells, joined | 1.000 to 1.000 |" in census_map.purity_table(rows, [2])
    told = census_map.census_table(rows, [2], [8.0])
    assert [line.split("|")[3].strip() for line in told[2:]] == ["1.000 (1.000)"] * 4
    # the control: classes that do not depend on positions
    rows.truth = (torch.arange(80) // 2) % 2
    purity = float(census_map.purity_table(rows, [2])[2].split("|")[2].split()[0])
    assert 0.45 < purity < 0.65


@pytest.mark.slow
def test_rounds_are_timed_for_each_number_of_workers(capsys: pytest.CaptureFixture[str]) -> None:
    config = str(CONFIG.with_name("fedssl.yaml"))
    small = ["algorithm.local_steps=1", "model.width=4", "data.name=toy", "data.labelled=40"]
    assert rounds.main([config, *small, "--rounds", "1"]) == 0
    *_, line = capsys.readouterr().out.splitlines()
    name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
    one, two, times = map(float, cells)
    assert name == "fedssl" and one > 0 and two > 0 and times > 0


def test_any_setting_can_be_varied_and_the_ratio_is_of_the_first_to_the_last(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def play(prepared: Prepared, number: int, phase: str, into: Measured) -> None:
        run = prepared.config.run
        assert (prepared.config.source.stem, number, phase, run.workers) == ("fedssl", 4, "", 1)
        one, also = {"float32": (3.0, 100.0), "bfloat16": (2.0, 1.5)}[run.precision]
        into.seconds += [also, one, one]  # the median is not the mean

    monkeypatch.setattr(rounds, "play", play)
    varied = ["--vary", "run.precision=float32,bfloat16", "--rounds", "4"]
    assert rounds.main([str(CONFIG.with_name("fedssl.yaml")), "run.workers=1", *varied]) == 0
    *_, head, _, line = capsys.readouterr().out.splitlines()
    assert head == "| config | run.precision=float32, s | run.precision=bfloat16, s | times |"
    assert line == "| fedssl | 3.00 | 2.00 | 1.50 |"


def test_memory_of_sites_is_the_growth_after_the_warm_up() -> None:
    after = [{"flat": 80.0, "grows": 100.0 + more} for more in (0, 25)]
    rounds = [{"flat": 50.0, "grows": 100.0}, *after]
    *_, flat, grows = sites_memory.table(rounds, 1).splitlines()
    assert flat == "| flat | 80.0 | 80.0 | 80.0 | 80.0 | 0.0% |"
    assert grows == "| grows | 100.0 | 100.0 | 125.0 | 125.0 | 25.0% |"


@pytest.mark.slow
def test_a_network_trained_on_synthetic_rows_is_measured_on_the_test_rows_of_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "tiny.yaml"
    config.write_text(PLAIN)
    trained = command(config, f"run.output={tmp_path / 'run'}", "--quiet")
    assert trained.status == 0, trained.err
    shares = []
    for steps in ("0", "1"):
        asked = [str(tmp_path / "run"), "--count", "30", "--steps", steps]
        assert synthetic_classifier.main(asked) == 0
        line = capsys.readouterr().out.splitlines()[-1]
        shares.append([float(share) for share in line.strip("| ").split(" | ")])
    tests = len(load_dataset(load_config(config).data).y_test)
    final = json.loads((tmp_path / "run" / "results.json").read_text())["test_accuracy"]["final"]
    for count, _, named, judged, on_real, right, released in shares:
        assert count == 30
        assert all(v * 30 == pytest.approx(round(v * 30), abs=0.01) for v in (named, judged))
        assert right * tests == pytest.approx(round(right * tests), abs=tests * 1e-4)
        assert released == pytest.approx(final, abs=1e-4) and 0 <= on_real <= 1
    assert shares[0][5] != shares[1][5]  # the control: it does learn
