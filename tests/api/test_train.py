"""``privssl.train``: the runs of the command, from Python, without side effects on the process."""

import ast
import concurrent.futures
import logging
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import privssl
from privssl.core.federation import Round
from privssl.experiment import config as configs
from privssl.runs import round_loop
from tests.api.digits import PRIVATE, Net, arrays, config, dataset
from tests.support.command_line import command
from tests.support.fresh_imports import run_afresh


def run_python(code: str) -> str:
    """The output of a new process."""
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


ORDERS = {
    "the name first": "import privssl; a = privssl.train; import privssl.train; b = privssl.train",
    "the module first": "import privssl.train; a = privssl.train; b = privssl.train",
    "from the package": "from privssl import train as a; import privssl.train as b",
    "from the module": "from privssl.train import main; import privssl; a = b = privssl.train",
    "the interface first": "import privssl; privssl.load; a = privssl.train; from privssl import "
    "train as b",
}


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_train_is_a_function_and_a_command_in_every_order_of_imports(order: str) -> None:
    code = f"{order}\nimport inspect; said = [a is b, callable(a), 'main' in vars(a), "
    code += "*inspect.signature(a).parameters]"
    # Importing torch takes a new process seconds.
    said = run_afresh(code) if "load" in order else run_python(f"{code}\nprint(said)")
    assert ast.literal_eval(said) == [
        *(True, True, True),
        *("config", "overrides", "data", "model", "output", "progress"),
    ]


def test_importing_privssl_loads_neither_torch_nor_numpy() -> None:
    heavy = "('torch', 'numpy', 'pydantic')"
    ask = f"import sys, privssl; print([m for m in {heavy} if m in sys.modules])"
    assert run_python(ask) == "[]"
    assert run_python(ask.replace("privssl;", "privssl; import numpy;")) != "[]"  # the control


def test_a_run_from_python_has_the_bytes_of_the_commands_run(tmp_path: Path) -> None:
    path = config(tmp_path)
    assert command(path, "run.seed=3", f"run.output={tmp_path / 'a'}").status == 0
    run = privssl.train(path, {"run.seed": 3}, output=tmp_path / "b")
    assert run.folder == tmp_path / "b"
    for name in ("classifier.safetensors", "metrics.csv", "split.json"):
        assert (tmp_path / "a" / name).read_bytes() == (run.folder / name).read_bytes(), name


def test_a_users_rows_and_network_are_trained_and_predict(tmp_path: Path) -> None:
    x, y, x_test, y_test = arrays()
    data = privssl.Dataset.from_arrays(x, y, x_test, y_test, class_names=["no", "some", "much"])
    run = privssl.train(config(tmp_path), {"algorithm.rounds": 4}, data, Net, tmp_path / "run")
    assert run.results["dataset"] == "arrays"
    assert run.class_names == ["no", "some", "much"]
    assert run.metrics["round"] == [1.0, 2.0, 3.0, 4.0]
    probabilities = run.predict(x_test, probabilities=True)
    assert probabilities.shape == (30, 3)
    assert probabilities.dtype == np.float32
    assert np.allclose(probabilities.sum(axis=1), 1, atol=1e-5)
    names = np.array(run.class_names)[probabilities.argmax(axis=1)]
    assert (run.predict(x_test) == names).all()
    found = run.evaluate(x_test, y_test)
    assert found["accuracy"] == run.results["test_accuracy"]["final"]
    assert run.evaluate(x_test, np.array(run.class_names)[y_test])["accuracy"] == found["accuracy"]
    network = run.classifier()
    assert isinstance(network, Net)
    assert not network.training
    logits = network(run.network_input(x_test))
    assert np.allclose(logits.softmax(1).detach().numpy(), probabilities, atol=1e-6)
    [sentence] = [w for w in run.results["warnings"] if "batch norm" in w]
    assert "1 batch norms were replaced by group norm" in sentence
    assert run.guarantee is None
    assert run.audit()["verdict"] == "no_guarantee"


def test_a_private_run_from_python_has_a_guarantee_and_a_consistent_audit(tmp_path: Path) -> None:
    run = privssl.train(config(tmp_path, PRIVATE), None, dataset(), Net, tmp_path / "run")
    assert run.guarantee is not None
    assert run.guarantee.startswith("GUARANTEE: for every support agent")
    assert run.audit()["verdict"] == "consistent"


@pytest.mark.slow
def test_train_prints_nothing_unless_progress_is_requested(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = {"data.labelled": 4}  # there are ten classes: a warning
    run = privssl.train(config(tmp_path), given, output=tmp_path / "a")
    assert capfd.readouterr() == ("", "")
    assert any("data.labelled is 4" in text for text in run.results["warnings"])
    privssl.train(config(tmp_path), given, output=tmp_path / "b", progress=True)
    shown = capfd.readouterr()
    assert "data.labelled is 4" in shown.err
    assert "round 2/2" in shown.err
    assert shown.out == ""


def test_train_does_not_change_the_state_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def state() -> list[object]:
        log = logging.getLogger("privssl")
        signals = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
        mask = os.umask(0o77)
        os.umask(mask)
        return [
            *(torch.get_num_threads(), torch.get_rng_state().tolist(), signals, mask, os.getcwd()),
            *(str(np.random.get_state()), list(warnings.filters)),
            *(log.handlers[:], log.level, log.propagate, torch.is_grad_enabled()),
            dict(os.environ),
        ]

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        before = state()
        privssl.train(config(tmp_path), output=tmp_path / "run")
        with pytest.raises(privssl.UserError):
            privssl.train(config(tmp_path), output=tmp_path / "run")
        assert state() == before
    finally:
        torch.set_num_threads(threads)


@pytest.mark.slow
def test_train_runs_in_another_thread_and_with_workers(tmp_path: Path) -> None:
    path, data = config(tmp_path), dataset()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        there = pool.submit(privssl.train, path, {"run.workers": 2}, data, Net, tmp_path / "a")
        found = there.result()
    here = privssl.train(path, {"run.workers": 1}, data, Net, tmp_path / "b")
    one, other = (run.folder / "classifier.safetensors" for run in (found, here))
    assert one.read_bytes() == other.read_bytes()


def test_an_interrupted_run_resumes_from_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, data = config(tmp_path), dataset()
    whole = privssl.train(path, None, data, Net, tmp_path / "whole")
    one_round = round_loop.RoundLoop._run_round

    def stop(self: round_loop.RoundLoop, now: Round, *, last: bool) -> None:
        if now.number == 2:
            raise KeyboardInterrupt
        one_round(self, now, last=last)

    with monkeypatch.context() as patch:
        patch.setattr(round_loop.RoundLoop, "_run_round", stop)
        with pytest.raises(KeyboardInterrupt, match=r"continue with privssl\.train"):
            privssl.train(path, None, data, Net, tmp_path / "cut")
    assert privssl.open_run(tmp_path / "cut", Net).results["status"] == "interrupted"
    run = privssl.train(tmp_path / "cut", data=data, model=Net)
    assert run.results["status"] == "finished"
    assert run.evaluate(*arrays()[2:]) == whole.evaluate(*arrays()[2:])
    weights = "classifier.safetensors"
    assert (run.folder / weights).read_bytes() == (whole.folder / weights).read_bytes()
    assert (
        privssl.train(run.folder, data=data, model=Net).folder == run.folder
    )  # the run is finished and does not change


def test_resume_of_a_run_on_rows_in_memory_needs_the_rows(tmp_path: Path) -> None:
    run = privssl.train(config(tmp_path), None, dataset(), output=tmp_path / "run")
    text = (run.folder / "config.yaml").read_text()
    assert "name: arrays" in text
    assert f"checksum: {dataset().checksum}" in text
    (run.folder / "results.json").unlink()
    outcome = command("--resume", run.folder)
    assert outcome.status == 2
    assert "rows in memory" in outcome.err
    with pytest.raises(privssl.UserError, match=r"data has other rows than .*config\.yaml") as said:
        privssl.train(run.folder, data=dataset(rows=121))
    assert dataset(rows=121).checksum[:6] not in str(
        said.value
    )  # an attacker could guess private rows
    again = privssl.train(run.folder / "config.yaml", data=dataset(), output=tmp_path / "again")
    weights = "classifier.safetensors"
    assert (run.folder / weights).read_bytes() == (again.folder / weights).read_bytes()


def test_a_loaded_config_can_be_run_several_times(tmp_path: Path) -> None:
    experiment = privssl.load(config(tmp_path), ["algorithm.rounds=1"])
    assert experiment.config.algorithm.rounds == 1
    runs = [experiment.run(dataset(), output=tmp_path / name) for name in ("a", "b")]
    assert runs[0].metrics["test/accuracy"] == runs[1].metrics["test/accuracy"]


def test_a_config_may_be_a_mapping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fedavg = {"agents": {"support": 2}, "algorithm": {"name": "fedavg", "rounds": 1}}
    run = privssl.train(fedavg, {"data.labelled": 20, "run.name": "mine"}, dataset())
    assert run.folder == Path("runs/mine-0")
    with pytest.raises(privssl.UserError, match=r"config: 1 problem\n.*algorithm\.rounds"):
        privssl.load({**fedavg, "algorithm": {"name": "fedavg", "rounds": 0}})


def test_train_raises_the_error_text_that_the_command_prints(tmp_path: Path) -> None:
    path = config(tmp_path)
    outcome = command(path, "run.seedd=1", "algorithm.rounds=0")
    with pytest.raises(privssl.UserError) as caught:
        privssl.train(path, {"run.seedd": 1, "algorithm.rounds": 0})
    assert outcome.err.strip() == str(caught.value).strip()
    with pytest.raises(privssl.UserError, match=r"run\.seed is np\.int64\(1\)"):
        privssl.train(path, {"run.seed": np.int64(1)})
    with pytest.raises(privssl.UserError, match="no such file"):
        privssl.load(tmp_path / "absent.yaml")


@pytest.mark.parametrize("data", ["rows.npz", (np.zeros((4, 8, 8)), np.zeros(4, int))])
def test_data_that_is_no_dataset_raises_one_clear_error(data: Any, tmp_path: Path) -> None:
    with pytest.raises(privssl.UserError, match=r"Give a privssl\.Dataset"):
        privssl.train(config(tmp_path), data=data, output=tmp_path / "run")


def test_a_config_that_is_no_file_and_no_mapping_raises_one_clear_error() -> None:
    with pytest.raises(privssl.UserError, match=r"config is 3\. Give a YAML file, its sections"):
        privssl.train(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("overrides", ["run.seed=1", 1, [1]])
def test_invalid_overrides_raise_one_clear_error(overrides: Any, tmp_path: Path) -> None:
    with pytest.raises(privssl.UserError, match=r"overrides is .* Give \{.* or a list of"):
        privssl.load(config(tmp_path), overrides)
    assert privssl.load(config(tmp_path), ["run.seed=1"]).config.run.seed == 1  # the control


def test_a_private_run_writes_no_hash_of_its_rows_and_resumes_only_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attacker who has all rows but one could try rows until an unkeyed hash matches."""
    given = {"algorithm.rounds": 1}
    run = privssl.train(config(tmp_path, PRIVATE), given, dataset(), output=tmp_path / "run")
    digest = dataset().checksum
    told = {path.name for path in run.folder.rglob("*") if path.is_file()
            if path.name != "split.json" and digest.encode() in path.read_bytes()}  # fmt: skip
    assert not told
    assert configs.load_config(run.folder / "config.yaml").data.checksum == ""
    assert digest in (run.folder / "split.json").read_text()  # the owner's
    (run.folder / "results.json").unlink()
    with pytest.raises(privssl.UserError, match="began with other data"):
        privssl.train(run.folder, data=dataset(rows=121))
    assert privssl.train(run.folder, data=dataset()).results["status"] == "finished"
