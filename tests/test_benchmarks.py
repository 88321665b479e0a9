"""Benchmarks that numbers of the docs come from: they measure what they say."""

import json
from pathlib import Path

import pytest
from command_line import command

from benchmarks import census_curve, epsilon_figure
from benchmarks.epsilon_figure import Point, points_of
from privssl.config import load

CONFIG = Path(__file__).parents[1] / "configs" / "label_census.yaml"
SMALL = [
    "data.unlabelled=200", "algorithm.encoder_rounds=1", "algorithm.encoder_steps=2",
    "algorithm.cells=20", "algorithm.cluster_rounds=3", "algorithm.vote_rounds=1",
    "algorithm.self_training_rounds=1", "algorithm.local_steps=2",
]  # fmt: skip


def test_a_census_on_a_shared_map_ends_where_a_whole_run_ends(tmp_path: Path) -> None:
    # Without noise both have the seed alone, so they agree to the last row; the second epsilon is
    # there to show that the first leaves nothing behind.
    endless = float("inf")
    told = census_curve.measure(load(CONFIG, SMALL), [endless, 1.0, endless])
    run = tmp_path / "run"
    trained = command(CONFIG, *SMALL, "privacy=null", f"run.output={run}", "--quiet")
    assert trained.status == 0, trained.err
    final = json.loads((run / "results.json").read_text())["test_accuracy"]["final"]
    assert told[0]["test"] == told[2]["test"] == final


def test_runs_become_points_with_their_claim_or_without(tmp_path: Path) -> None:
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


def test_a_figure_tells_mean_deviation_and_worst_of_each_point(tmp_path: Path) -> None:
    points = [Point("m", 100, 1.0, False, value) for value in (0.90, 0.94)]
    picture = tmp_path / "figure.png"
    lines = epsilon_figure.draw([*points, Point("n", 300, None, False, 0.5)], picture)
    assert "| m | 100 | 1 | 2 | 0.9200 | 0.0283 | 0.9000 |" in lines
    assert "| n | 300 | - | 1 | 0.5000 | 0.0000 | 0.5000 |" in lines
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_what_is_no_run_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert epsilon_figure.main([str(tmp_path / "figure.png"), str(tmp_path)]) == 2
    assert f"{tmp_path}: no finished run" in capsys.readouterr().err
