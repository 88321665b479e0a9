"""``privssl compare --vary``, paired differences, and the files for a paper."""

import csv
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from privssl.compare import __main__ as compare
from privssl.compare import files, paired, plan, vary
from privssl.errors import ConfigError
from tests.support import comparison_row
from tests.support.command_line import Outcome, assert_refused, run_main

CONFIG = """\
data: {name: toy, labelled: 40, unlabelled: 80}
agents: {support: 2, query: 2}
model: {name: small_cnn, width: 4}
algorithm: {name: pseudo, rounds: 1, local_steps: 1, batch_size: 8}
run: {images_every: 100, workers: 1}
"""


def command(*arguments: object) -> Outcome:
    return run_main(compare.main, *arguments)


def row(name: str, accuracies: Sequence[float], splits: Sequence[str] = (), **more: Any) -> Any:
    runs = [
        comparison_row.results(
            seed=seed, test_accuracy={"final": value, "best": value},
            split_hash=splits[seed] if splits else f"split {seed}",
        )
        for seed, value in enumerate(accuracies)
    ]  # fmt: skip
    return comparison_row.row(name, runs, **more)


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """The folder of a sweep over two keys with two seeds each, and the command's output."""
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "base.yaml").write_text(CONFIG)
    outcome = command(
        folder / "base.yaml", "--vary", "algorithm.learning_rate=1e-3,0.1",
        "--vary", "model.norm=group,none", "--seeds", 2, "--output", folder / "out", "--json",
        "--quiet",
    )  # fmt: skip
    assert outcome.status == 0, outcome
    return folder / "out", outcome


NAMES = [f"base,learning_rate={rate},norm={norm}" for rate in ("1e-3", "0.1")
         for norm in ("group", "none")]  # fmt: skip


def test_each_point_of_the_grid_is_a_row_named_by_its_values(swept: tuple[Path, Outcome]) -> None:
    folder, outcome = swept
    assert [of["config"] for of in json.loads(outcome.out)["rows"]] == NAMES
    for name in NAMES:
        text = (folder / f"{name}-1" / "config.yaml").read_text()
        assert f"norm: {name.rpartition('=')[2]}" in text
        assert ("learning_rate: 0.001" in text) == ("1e-3" in name)


def test_the_csv_has_a_line_per_run_with_the_varied_values(
    swept: tuple[Path, Outcome],
) -> None:
    folder, _ = swept
    with (folder / "runs.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [(line["config"], line["seed"]) for line in lines] == [
        (name, seed) for name in NAMES for seed in "01"
    ]
    for line in lines:
        results = json.loads((folder / f"{line['config']}-{line['seed']}/results.json").read_text())
        assert float(line["final_test_accuracy"]) == results["test_accuracy"]["final"]
        assert line["split_hash"] == results["split_hash"]
        assert f"norm={line['model.norm']}" in line["config"]
        assert float(line["algorithm.learning_rate"]) == (
            0.001 if "1e-3" in line["config"] else 0.1
        )


def test_the_command_writes_a_latex_table_and_a_vector_figure(swept: tuple[Path, Outcome]) -> None:
    folder, _ = swept
    text = (folder / "comparison.tex").read_text()
    body = [line for line in text.splitlines() if not line.startswith("%")]
    lines = [line for line in body if line.endswith(r"\\")]
    assert (body[0][:15], body[-1]) == (r"\begin{tabular}", r"\end{tabular}")
    columns = body[0].removeprefix(r"\begin{tabular}{").removesuffix("}")
    assert {line.count(" & ") + 1 for line in lines} == {len(columns)}
    assert [line.partition(" & ")[0] for line in lines[1:]] == [
        name.replace("_", r"\_") for name in NAMES
    ]
    assert "Best is" in text and "best" not in lines[0]  # chosen on test rows: no result
    picture = (folder / "comparison.pdf").read_bytes()
    assert picture.startswith(b"%PDF") and b"/Type3" not in picture
    assert (folder / "comparison.png").read_bytes().startswith(b"\x89PNG")


def test_special_characters_of_latex_are_escaped() -> None:
    odd = r"a_b%c&d#e$f{g}h~i^j\k"
    text = files.latex([row(odd, [0.5]), row("b\n\\input{x}", [0.5])], [])
    expected = r"a\_b\%c\&d\#e\$f\{g\}h\textasciitilde{}i\textasciicircum{}j\textbackslash{}k"
    assert expected in text and odd not in text
    assert r"\input" not in text


def test_the_paired_differences_of_a_sweep_follow_from_its_results(
    swept: tuple[Path, Outcome],
) -> None:
    folder, outcome = swept
    whole = json.loads(outcome.out)
    finals = [np.array(of["final_test_accuracy"]["values"]) for of in whole["rows"]]
    found = whole["paired_differences"]
    assert [one["config"] for one in found] == NAMES[1:]
    for one, values in zip(found, finals[1:], strict=True):
        assert one["minus"] == NAMES[0]
        assert one["values"] == (values - finals[0]).tolist()
    text = (folder / "comparison.md").read_text()
    assert "## Paired differences" in text and "There are 3 tests" in text
    assert "| p (Holm) |" in text and "p (Holm)" in (folder / "comparison.tex").read_text()


# The statistics ---------------------------------------------------------------------------------


def test_interval_and_p_are_those_of_scipys_paired_t_test() -> None:
    ours, bound = [0.81, 0.84, 0.79, 0.90, 0.86], [0.80, 0.81, 0.80, 0.85, 0.83]
    [one] = paired.differences([row("bound", bound), row("ours", ours)])
    test = stats.ttest_rel(ours, bound)
    interval = test.confidence_interval(0.95)
    assert one.mean == pytest.approx(0.022)
    assert (one.low, one.high) == pytest.approx((interval.low, interval.high))
    assert one.p_value == pytest.approx(test.pvalue)
    # The control: rows that are not paired have another p value.
    assert one.p_value != pytest.approx(stats.ttest_ind(ours, bound).pvalue)


def test_the_confidence_interval_has_its_nominal_coverage() -> None:
    rng = np.random.default_rng(0)
    luck = rng.normal(0, 0.3, (2000, 4))  # of a split; cancels
    values = luck + rng.normal(0.1, 0.05, (2000, 4)) - luck
    found = [paired.difference("a", "b", of.tolist()) for of in values]
    covered = np.mean([one.low <= 0.1 <= one.high for one in found])
    assert covered == pytest.approx(0.95, abs=0.015)  # 3 standard errors
    # The control: an interval from the normal law would be too short for four seeds.
    short = [abs(one.mean - 0.1) <= 1.96 * np.std(one.values, ddof=1) / 2 for one in found]
    assert np.mean(short) < 0.90


def test_corrected_p_values_control_the_family_wise_error_rate() -> None:
    """Holm's method by hand, and its error rate, which uncorrected p values exceed."""
    p = [0.01, 0.04, 0.03, 0.005]  # in order times 4, 3, 2, 1: 0.02, 0.03, 0.06, 0.04 -> 0.06
    assert paired.corrected(p) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert paired.corrected([0.5, 0.9]) == [1, 1] and paired.corrected([]) == []
    rng = np.random.default_rng(0)
    none_differs = rng.normal(0, 1, (1000, 5, 4))  # comparisons, configs, seeds
    tests = [
        [paired.difference("a", "b", v.tolist()).p_value or 0.0 for v in c] for c in none_differs
    ]
    false = np.mean([min(paired.corrected(of)) < 0.05 for of in tests])
    assert false == pytest.approx(0.05, abs=0.02)  # 3 standard errors
    assert np.mean([min(of) < 0.05 for of in tests]) > 0.18  # the control: 1 - 0.95^5 = 0.23


def test_p_values_are_corrected_over_the_configs_of_a_comparison() -> None:
    first = row("a", [0.1, 0.2, 0.3])
    others = [row("b", [0.2, 0.31, 0.42]), row("c", [0.2, 0.3, 0.4]), row("d", [0.3, 0.1, 0.3])]
    b, c, d = paired.differences([first, *others])
    assert c.p_value is None and c.holm is None  # no test
    assert b.p_value and d.p_value and b.p_value < d.p_value
    assert b.holm == pytest.approx(2 * b.p_value) and d.holm == d.p_value
    [alone] = paired.differences([first, others[0]])
    assert alone.holm == alone.p_value == b.p_value


def test_equal_results_have_difference_zero_and_no_p_value() -> None:
    [one] = paired.differences([row("a", [0.1, 0.2, 0.3]), row("b", [0.1, 0.2, 0.3])])
    assert (one.mean, one.low, one.high, one.p_value) == (0, 0, 0, None)
    assert one.p_text() == "none" and json.dumps(one.as_json())
    [shifted] = paired.differences([row("a", [0.1, 0.2, 0.3]), row("b", [0.2, 0.3, 0.4])])
    assert shifted.p_value is None and math.isclose(shifted.low, 0.1)


@pytest.mark.parametrize(
    "other",
    [
        row("b", [0.2, 0.3], ["split 0", "another"]),
        row("b", [0.2, 0.3], differs=["data.alpha"]),
    ],
)
def test_runs_on_different_splits_are_not_paired(other: Any) -> None:
    first = row("a", [0.1, 0.2])
    assert paired.differences([first, other]) == []
    assert len(paired.differences([first, other, row("c", [0.2, 0.3])])) == 1  # the control
    assert "Paired" not in "".join(files.paired_section(paired.differences([first, other])))


def test_a_private_config_is_paired_with_one_without_privacy_on_its_splits() -> None:
    first = row("a", [0.1, 0.2])
    assert len(paired.differences([first, row("b", [0.2, 0.3], ["withheld"] * 2)])) == 1
    other = row("b", [0.2, 0.3], ["withheld"] * 2, differs=["data.alpha"])
    assert paired.differences([first, other]) == []  # the control


def test_one_seed_has_no_confidence_interval() -> None:
    assert paired.differences([row("a", [0.1]), row("b", [0.2])]) == []


# Mistakes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "error_text"),
    [
        (["algorithm.rounds"], "write section.key=a,b,c"),
        (["rounds=1,2"], "write section.key=a,b,c"),
        (["algorithm.rounds=1,,2"], "write section.key=a,b,c"),
        (["algorithm.rounds=1,2,1"], "give each value once"),
        (["algorithm.learning_rate=0.1,1.0e-1"], "are the same runs. Give each value once"),
        (["algorithm.rounds=1,2", "algorithm.rounds=3"], "is given twice"),
        (["run.seed=1,2"], "use --seeds"),
        (["run.name=a,b"], "--vary run.name"),
        (["run.output=a,b"], "use --output"),
        (["algorithm.roundz=1,2"], "Did you mean rounds?"),
        (["algorithm.rounds=1,0"], "algorithm.rounds"),
        ([f"algorithm.rounds={','.join(map(str, range(1, 202)))}"], "more than 200 variants"),
    ],
)
def test_a_mistake_is_reported_before_anything_runs(
    given: list[str], error_text: str, tmp_path: Path
) -> None:
    (tmp_path / "base.yaml").write_text(CONFIG)
    flags = [text for value in given for text in ("--vary", value)]
    outcome = command(tmp_path / "base.yaml", *flags, "--output", tmp_path / "out")
    assert_refused(outcome, error_text)
    assert not (tmp_path / "out").exists()


def test_the_error_about_a_varied_split_key_names_the_variant(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(CONFIG)
    outcome = command(
        tmp_path / "base.yaml", "--vary", "data.labelled=40,50", "--output", tmp_path / "out"
    )
    assert_refused(outcome, "(base,labelled=50): data.labelled is 50, not 40")


def test_names_of_variants_are_valid_folder_names_and_keep_lists_together(tmp_path: Path) -> None:
    found = vary.grid(["model.name=torchvision:resnet18,a.b:C", "privacy.protect=[F],[F, G]"])
    assert [variant.overrides[1] for variant in found[:2]] == [
        "privacy.protect=[F]", "privacy.protect=[F, G]",
    ]  # fmt: skip
    assert found[0].name == ",name=torchvision-resnet18,protect=[F]"
    both = vary.grid(["data.alpha=1", "algorithm.alpha=2"])
    assert both[0].name == ",data.alpha=1,algorithm.alpha=2"
    (tmp_path / "base.yaml").write_text(CONFIG)
    with pytest.raises(ConfigError, match="both have the name"):  # which differ in spaces alone
        plan.load_configs([str(tmp_path / "base.yaml")], ["model.options={},{ }"])
