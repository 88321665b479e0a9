"""Meaningless runs are refused at the start, or reported at the end and in results.json."""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import privssl.train as train
from privssl.algorithms import ALGORITHMS
from privssl.errors import ConfigError
from privssl.experiment.config import load_config
from privssl.runs.result_warnings import untrained_warnings
from tests.support.command_line import PLAIN, Outcome, command

#: Algorithms that train with batch norm -> placement of labels.
BATCH_NORM = {
    **dict.fromkeys(("fedssl", "supervise", "pseudo", "mixmatch", "fedavg", "fedprox"), "support"),
    **dict.fromkeys(("fixmatch", "uda", "fedsem", "fedseal", "fedtrinet", "sage"), "support"),
    **dict.fromkeys(("feddyn", "lg_fedavg", "fedrgd"), "support"),
    **dict.fromkeys(("fedmatch_mixup", "pi_model", "mean_teacher", "remixmatch"), "support"),
    "server_sl": "labels-at-server",
}


def write_config(folder: Path, text: str, name: str = "tiny.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def run(folder: Path, text: str, *arguments: str) -> tuple[Outcome, list[str]]:
    """Train a run; return its output and the warnings of its results.json."""
    outcome = command(
        write_config(folder, text), f"run.output={folder / 'run'}", "--quiet", "run.workers=1",
        *arguments,
    )  # fmt: skip
    assert outcome.status == 0, outcome
    results: dict[str, Any] = json.loads((folder / "run" / "results.json").read_text())
    return outcome, list(results["warnings"])


# Batch norm ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BATCH_NORM)
def test_batch_norm_with_batches_of_one_row_is_refused(name: str, tmp_path: Path) -> None:
    labels = BATCH_NORM[name]
    agents = "query: 2" if labels == "labels-at-server" else "support: 2, query: 2"
    path = write_config(
        tmp_path,
        f"data: {{name: toy, labelled: 100, labels: {labels}}}\nagents: {{{agents}}}\n"
        f"model: {{norm: batch}}\nalgorithm: {{name: {name}}}\n",
    )
    with pytest.raises(ConfigError, match=r"algorithm\.batch_size .*batch norm needs two rows"):
        load_config(path, ["algorithm.batch_size=1"])
    with pytest.raises(ConfigError, match=r"data\.labelled .*single labelled row"):
        load_config(path, [f"data.labelled={1 if 'server' in labels else 2}"])
    # The controls: two rows, and another norm.
    load_config(path, ["algorithm.batch_size=2"])
    if name != "fedseal":  # fedseal needs several rows for another reason
        load_config(path, ["algorithm.batch_size=1", "model.norm=group"])


def test_every_other_algorithm_refuses_batch_norm(tmp_path: Path) -> None:
    for name in set(ALGORITHMS) - set(BATCH_NORM) - {"label_census"}:
        path = write_config(
            tmp_path,
            "data: {name: toy, labelled: 40}\nagents: {support: 2, query: 2}\n"
            f"model: {{norm: batch}}\nalgorithm: {{name: {name}}}\n",
        )
        with pytest.raises(ConfigError, match=r"model\.norm "):
            load_config(path)


# Untrained networks and missing classes -----------------------------------------------------


def test_an_untrained_network_is_reported_at_the_end_and_in_the_results(tmp_path: Path) -> None:
    """A budget of 0 lets no support agent take part; the control trains."""
    text = (
        "data: {name: toy, labelled: 40}\nagents: {support: 2}\nmodel: {width: 4}\n"
        "algorithm: {name: fedavg, rounds: 1}\n"
    )
    outcome, warnings = run(tmp_path, text + "privacy: {epsilon: 0, delta: 1e-5}\n")
    [sentence] = [text for text in warnings if "F took no training step" in text]
    assert sentence.startswith("F took no training step")
    assert sentence in outcome.out
    trained = tmp_path / "trained"
    trained.mkdir()
    outcome, warnings = run(trained, text)
    assert not [text for text in warnings if "took no training step" in text]
    assert "took no training step" not in outcome.out + outcome.err


def test_only_networks_without_any_change_count_as_untrained() -> None:
    before = json.dumps({"F": "1", "G": "2"})
    assert untrained_warnings(before, before)[0].startswith("F, G took no training step")
    assert untrained_warnings(before, json.dumps({"F": "9", "G": "2"}))[0].startswith("G took no")
    assert untrained_warnings(before, json.dumps({"F": "9", "G": "9"})) == []


CLASSES = 10  # of digits


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize(("labelled", "warned"), [(CLASSES - 4, True), (CLASSES, False)])
def test_fewer_labelled_rows_than_classes_give_a_warning_from_public_numbers(
    private: bool, labelled: int, warned: bool, tmp_path: Path
) -> None:
    text = (
        f"data: {{name: digits, labelled: {labelled}}}\nagents: {{support: 1}}\n"
        "algorithm: {name: fedavg, rounds: 1}\n"
    ) + ("privacy: {epsilon: 8, delta: 1e-2}\n" if private else "")
    outcome = command(write_config(tmp_path, text), "--dry-run")
    assert outcome.status == 0, outcome
    said = f"Warning: data.labelled is {labelled}, but there are 10 classes: at least 4"
    assert (said in outcome.err) is warned
    # Missing classes depend on labels, so private runs do not report them.
    assert "have no labelled row (" not in outcome.err


def test_a_warning_names_classes_without_labelled_rows_unless_the_run_is_private(
    tmp_path: Path,
) -> None:
    text = (
        "data: {name: digits, labelled: 12, stratified: false}\nagents: {support: 1}\n"
        "algorithm: {name: fedavg, rounds: 1}\n"
    )
    said = "classes have no labelled row ("
    assert said in command(write_config(tmp_path, text), "--dry-run").err
    private = text + "privacy: {epsilon: 8, delta: 1e-2}\n"
    assert said not in command(write_config(tmp_path, private), "--dry-run").err
    assert said not in command(
        write_config(tmp_path, text), "--dry-run", "data.stratified=true", "data.labelled=20"
    ).err  # fmt: skip


def test_a_warning_names_an_agent_without_rows_for_a_step(tmp_path: Path) -> None:
    text = (
        "data: {name: digits, labelled: 20, unlabelled: 3, partition: round_robin}\n"
        "agents: {support: 1, query: 3}\nmodel: {norm: batch}\n"
        "algorithm: {name: fedsem, rounds: 50}\n"
    )
    outcome = command(write_config(tmp_path, text), "--dry-run")
    assert outcome.status == 0, outcome
    assert "q0 holds 1 of the 2 rows that a step needs: it takes none" in outcome.err
    control = command(write_config(tmp_path, text), "--dry-run", "model.norm=group")
    assert "holds 1 of" not in control.err


# Threads ------------------------------------------------------------------------------------


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_warning_about_several_threads_says_what_to_set(
    threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", str(threads))
    torch.set_num_threads(threads)  # as libgomp does when torch is imported
    try:
        outcome = command(write_config(tmp_path, PLAIN), "--dry-run")
    finally:
        torch.set_num_threads(1)
    assert outcome.status == 0
    assert ("Set OMP_NUM_THREADS=1" in outcome.err) is (threads > 1)


# Output in other encodings ------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["ascii", pytest.param("latin-1", marks=pytest.mark.slow)])
def test_the_last_lines_are_printed_in_any_output_encoding(encoding: str, tmp_path: Path) -> None:
    """Folder and run name have letters that the encoding lacks; the guarantee is the last line."""
    text = (
        "data: {name: toy, labelled: 40}\nagents: {support: 1}\nmodel: {width: 4}\n"
        "run: {name: λ}\nalgorithm: {name: fedavg, rounds: 1}\n"
    )
    folder = tmp_path / "läufe-β"
    folder.mkdir()
    told = io.BytesIO(), io.BytesIO()
    out = io.TextIOWrapper(told[0], encoding=encoding, write_through=True)
    err = io.TextIOWrapper(told[1], encoding=encoding, errors="backslashreplace")
    arguments = [str(write_config(folder, text)), "--quiet", f"run.output={folder / 'run'}"]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = train.main(arguments)
    err.flush()
    assert status == 0, told[1].getvalue()
    lines = told[0].getvalue().decode(encoding).splitlines()
    assert lines[-1].startswith("NO GUARANTEE")
    assert "\\u03b2" in lines[-2]  # the folder: beta is in neither of them
    assert b"Traceback" not in told[1].getvalue()


def test_control_plain_printing_fails_in_such_an_encoding(tmp_path: Path) -> None:
    """The control: Python's default output of such a text."""
    with pytest.raises(UnicodeEncodeError):
        io.TextIOWrapper(io.BytesIO(), encoding="ascii").write("läufe-β")
