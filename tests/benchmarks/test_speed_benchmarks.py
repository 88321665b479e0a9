"""Benchmarks of speed compare the same arithmetic, and leave no process running.

No test here measures time.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchvision import transforms

from benchmarks import (
    against_flower_and_pfl,
    batched_agents,
    gpu_report,
    hot_loop,
    plain_fixmatch,
    plain_loop,
    private_step,
    processes,
    rounds,
    scale,
    sites_memory,
)
from benchmarks.cell import ours as cell_ours
from benchmarks.cell import plain as cell_plain
from benchmarks.cell import work as cell
from benchmarks.plain_loop import Work, apart, counted_steps
from benchmarks.processes import Told, carry_out
from privssl.settings.schema import ModelSettings

ROOT = Path(__file__).parents[2]

SMALL = argparse.Namespace(
    data="digits", agents=2, rows=24, batch=10, epochs=2, rounds=2, augment="none", beside=0
)

FEW = argparse.Namespace(
    data="digits", agents=2, rows=40, labels=50, batch=10, rate=0.02, warm_up=300
)


@pytest.mark.parametrize(
    "main",
    [
        b.main
        for b in (
            *(against_flower_and_pfl, batched_agents, gpu_report, hot_loop, plain_loop),
            *(plain_fixmatch, private_step, rounds, scale, sites_memory),
        )
    ],
    ids=lambda main: main.__module__.partition(".")[2],
)
def test_each_command_prints_what_it_measures(
    main: Callable[[Sequence[str]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert "python -m benchmarks." in capsys.readouterr().out


@pytest.mark.slow  # each section has its own test
def test_the_gpu_report_keeps_finished_sections_when_one_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(device: torch.device, small: bool) -> list[dict[str, Any]]:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setitem(gpu_report.SECTIONS, "cell", failing)
    into = tmp_path / "new" / "cpu.json"
    given = ["--device", "cpu", "--small", "--output", str(into)]
    assert gpu_report.main([*given, "--only", "cell", "networks", "batched_agents"]) == 1
    report = json.loads(into.read_text())
    assert (report["gpu"], report["small"]) == (None, True)  # what the doctor reads
    sections = report["sections"]
    assert sections["cell"]["error"] == "RuntimeError: CUDA out of memory"
    assert all(one["alike"] for one in sections["networks"]["measured"])
    seen = {
        (one["method"], one["agents_at_once"]) for one in sections["batched_agents"]["measured"]
    }
    assert seen == {(name, n) for name in ("fedssl", "pseudo") for n in (1, 2)}


def test_without_a_gpu_the_report_ends_with_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert gpu_report.main([]) == 2
    assert "torch sees no GPU here" in capsys.readouterr().err


def test_the_table_head_distinguishes_two_processors_with_one_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "cpuinfo"
    monkeypatch.setattr(processes, "CPUINFO", info)
    one = "processor\t: {}\ncpu family\t: {}\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n"
    heads = []
    for family in (25, 26):
        info.write_text("\n".join(one.format(number, family) for number in range(2)))
        heads.append(processes.about())
    assert heads[0].startswith("AMD EPYC (family 25, model 17), ")
    assert heads[1].startswith("AMD EPYC (family 26, model 17), ")
    info.write_text("processor\t: 0\nCPU part\t: 0xd40\n")  # ARM has other fields
    name = platform.processor() or platform.machine()
    assert processes.about().startswith(f"{name} (model 0xd40), ")
    info.unlink()
    monkeypatch.delattr(os, "sched_getaffinity")
    assert processes.about().startswith(f"{name}, {os.cpu_count()} cores, ")


# Agents in one stream of kernels --------------------------------------------------------------


@pytest.mark.slow
def test_agents_at_once_are_timed_and_reach_the_same_classifier(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = [str(ROOT / "configs" / "fedavg.yaml"), "--at-once", "1,2", "--rounds", "1"]
    small = ["run.device=cpu", "algorithm.local_epochs=1", "data.labelled=40", "model.width=8"]
    assert batched_agents.main([*asked, *small]) == 0
    told = capsys.readouterr().out
    assert told.startswith("Device cpu: ")
    rows = [line.split(" | ") for line in told.splitlines() if line.startswith("| fedavg")]
    assert [row[1] for row in rows] == ["1", "2"]
    assert rows[0][4] == "1.00"
    assert 0 < float(rows[1][5].removesuffix(" |")) < 1e-4  # 0: no difference
    private = [str(ROOT / "configs" / "fedavg_dp.yaml"), *asked[1:], "privacy.steps=2"]
    assert batched_agents.main([*private, "data.labelled=40", "model.width=8"]) == 0
    assert capsys.readouterr().out.count("| fedavg_dp |") == 2
    assert batched_agents.main([*asked, *small, "run.precision=bfloat16"]) == 2
    assert "are computed one by one" in capsys.readouterr().err


# The plain loop ------------------------------------------------------------------------------


def test_a_plain_loop_and_our_engine_take_the_same_steps_to_the_same_weights() -> None:
    work = Work.of(SMALL)
    with contextlib.ExitStack() as stack, counted_steps() as count:
        plain, ours = work.plain("plain", 1), work.ours("float32", 1, stack)
        taken = []
        for one in (plain, ours):
            before = count[0]
            one.play(1)
            one.play(2)
            taken.append(count[0] - before)
        # 2 rounds of 2 agents, 2 epochs of 24 rows in batches of 10
        assert taken == [2 * 2 * 2 * 3] * 2
        assert apart(plain.weights(), work.begin) > 1e-2
        assert apart(plain.weights(), ours.weights()) < 1e-5
        # the control: batches in another order
        other = work.plain("plain", 1)
        other.play(1)
        other.play(3)
        assert apart(other.weights(), ours.weights()) > 1e-4


def test_the_plain_loop_and_ours_both_augment_rows_or_neither_does() -> None:
    row = np.arange(64, dtype=np.uint8).reshape(1, 1, 8, 8).repeat(20, axis=0)
    for augment, fewest, most in (("none", 1, 1), ("mid", 10, 20)):  # small turns may look alike
        images = plain_loop.Images(row, np.zeros(20, dtype=np.int64), augment)
        assert fewest <= len({images[n][0].numpy().tobytes() for n in range(20)}) <= most
    trained = []
    for augment in ("none", "mid"):
        work = Work.of(argparse.Namespace(**vars(SMALL) | {"augment": augment}))
        with contextlib.ExitStack() as stack:
            ours = work.ours("float32", 1, stack)
            ours.play(1)
            trained.append(ours.weights())
    assert apart(*trained) > 1e-4


def test_a_competitor_with_another_training_result_is_reported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    work = Work.of(SMALL)
    with contextlib.ExitStack() as stack:
        competitors = [work.plain("plain", 1), work.ours("float32", 1, stack)]
        plain_loop.take_turns(competitors, 1)
        assert plain_loop.report(competitors, work, SMALL) == 0
        assert "Trained alike." in capsys.readouterr().out
        first, competitors[0].first = competitors[0].first, work.begin
        assert plain_loop.report(competitors, work, SMALL) == 1
        assert "NOT trained alike." in capsys.readouterr().out
        competitors[0].first = first
        constant = {name: torch.zeros_like(value) for name, value in work.begin.items()}
        competitors[0].weights = lambda: constant  # finally one class for all rows
        assert plain_loop.report(competitors, work, SMALL) == 1
        assert "NOT trained alike." in capsys.readouterr().out


def test_background_load_keeps_cores_busy_until_its_benchmark_ends_or_is_killed() -> None:
    before = children(os.getpid())
    with processes.other_work(2):
        beside = children(os.getpid()) - before
        assert len(beside) == 2
        assert all(running(one) for one in beside)
        assert len({os.getsid(0), *map(os.getsid, beside)}) == 3
    assert not any(running(one) for one in beside)
    with processes.other_work(0):
        assert children(os.getpid()) <= before
    killed = "import time; from benchmarks.processes import other_work as w\n"
    killed += "with w(1): print('begun', flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", killed], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"begun\n"
        (beside_it,) = children(parent.pid)
        parent.kill()
    deadline = time.monotonic() + 120
    while running(beside_it):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def children(parent: int) -> set[int]:
    """Children of its first thread, as listed by Linux."""
    return set(map(int, Path(f"/proc/{parent}/task/{parent}/children").read_text().split()))


def running(process: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:  # it ended before its file was opened, or read
        return False


@pytest.mark.slow
def test_fixmatch_by_a_plain_loop_and_by_our_engine_gives_the_same_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without augmentation, since both draw their own views."""
    alike = dataclasses.replace(plain_fixmatch.Work.of(FEW).config, weak="none", strong="none")
    monkeypatch.setattr(plain_fixmatch.Work, "config", alike)
    monkeypatch.setattr(plain_fixmatch, "CROP", 0)
    monkeypatch.setattr(transforms, "RandomApply", lambda *_: lambda image: image)
    work = plain_fixmatch.Work.of(FEW)
    shares: tuple[list[float], list[float]] = ([], [])
    with contextlib.ExitStack() as stack:
        plain = work.plain("plain", 1, shares[0])
        ours = work.ours("float32", 1, shares[1], stack)
        for number in (1, 2):
            plain.play(number)
            ours.play(number)
        assert shares[0] == pytest.approx(shares[1])
        assert 0.1 < sum(shares[0]) / len(shares[0]) < 1.0  # some rows are confident, some are not
        assert apart(plain.weights(), work.begin) > 1e-3
        assert apart(plain.weights(), ours.weights()) < 1e-5
        # the control: batches in another order
        plain.play(4)
        ours.play(3)
        assert apart(plain.weights(), ours.weights()) > 1e-4


def test_fixmatch_by_a_plain_loop_has_a_weak_and_a_strong_view_per_row() -> None:
    row = torch.arange(64, dtype=torch.uint8).reshape(1, 1, 8, 8).repeat(40, 1, 1, 1).numpy()
    views = plain_fixmatch.TwoViews(row)
    weak = {views[n][0].numpy().tobytes() for n in range(40)}
    strong = {views[n][1].numpy().tobytes() for n in range(40)}
    assert 2 <= len(weak) <= 9  # one pixel each way
    assert len(strong) > 9
    assert {views[n][2] for n in range(40)} == {-1}
    labelled = plain_fixmatch.TwoViews(row, np.full(40, 7))
    assert {labelled[n][2] for n in range(40)} == {7}


@pytest.mark.parametrize(
    ("right", "shares", "status"),
    [((0.9, 0.94), (0.5, 0.55), 0), ((0.9, 0.8), (0.5, 0.55), 1), ((0.9, 0.9), (0.5, 0.7), 1)],
)
def test_a_fixmatch_competitor_with_another_training_result_is_reported(
    right: tuple[float, ...], shares: tuple[float, float], status: int,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    kept = {"plain": [shares[0]], "ours": [shares[1]]}
    assert plain_fixmatch.verdict(0.5, right, kept) == status
    assert ("NOT trained alike." in capsys.readouterr().out) == bool(status)


# pfl's cell ----------------------------------------------------------------------------------


def test_the_cell_has_the_network_of_pfl() -> None:
    layers = (3 * 3 * 3 * 32 + 32, 32 * 3 * 3 * 64 + 64, 64 * 14 * 14 * 128 + 128, 128 * 10 + 10)
    assert sum(p.numel() for p in cell.CellCNN().parameters()) == sum(layers) == 1_626_442
    first, second = cell.begin(), cell.begin()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("play", [cell_ours.main, cell_plain.main], ids=["ours", "plain"])
def test_a_competitor_on_the_cell_reports_each_round_and_is_evaluated(
    play: Callable[[], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in {"AGENTS": 4, "PER_ROUND": 2, "TEST_ROWS": 51}.items():
        monkeypatch.setattr(cell, name, value)
    cell.make_rows(tmp_path)
    monkeypatch.setattr(sys, "argv", ["cell", str(tmp_path), "2", "float32", "1"])
    with counted_steps() as count:
        play()
    assert count[0] == 2 * 2 * 5  # rounds, agents, batches of 10 of 50 rows
    told = capsys.readouterr().out.splitlines()
    assert [line.partition('"round": ')[2] for line in told] == ["0}", "1}", "2}", ""]
    assert '"loss": ' in told[-1]


def test_rates_start_up_and_cpu_time_are_read_from_a_competitors_report() -> None:
    # Launched at 100, rounds end at 110, 112, 116 and 118: three timed ones of 2, 4 and 2 s. The
    # first would have taken 2 s as well, so 8 s are start-up. 3 CPU seconds from 110 to 118.
    lines: list[dict[str, Any]] = [
        {"at": at, "round": n} for n, at in enumerate((107, 110, 112, 116, 118))
    ]
    lines.append({"at": 119, "loss": 1.0, "accuracy": 0.5})
    told = Told(100.0, tuple(lines), 512.0, ((100.0, 0.0), (110.0, 4.0), (118.0, 7.0)), 0, "")
    one = against_flower_and_pfl.Competitor("it", "ours", Path(), "float32", [told])
    numbers = one.numbers()
    assert (numbers.rate, numbers.rates) == (0.5, (0.25, 0.5))
    assert (numbers.begins, numbers.start) == (7.0, 8.0)
    assert (numbers.memory, numbers.cpu) == (512.0, 1.0)
    assert (numbers.loss, numbers.accuracy) == (1.0, 0.5)
    one.told = [dataclasses.replace(told, lines=told.lines[1:])]  # it cannot report its start
    assert (one.numbers().begins, one.numbers().start) == (8.0, 8.0)


def test_a_competitor_that_cannot_be_imported_is_omitted_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = argparse.Namespace(pfl_python=tmp_path / "python", flower_python=None, only=None)
    names = [one.name for one in against_flower_and_pfl.competitors(asked)]
    assert all(name.startswith(("privssl", "plain loop")) for name in names)
    told = capsys.readouterr().err
    assert f"pfl-research is left out: --pfl-python {tmp_path}" in told
    assert "Flower simulation is left out: --flower-python was not given" in told


# Methods, steps, operations ------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("network", ["F", "D"])
@pytest.mark.parametrize("mode", private_step.MODES)
def test_our_private_step_equals_those_of_opacus(network: str, mode: str) -> None:
    torch.manual_seed(0)
    private_step.check(private_step.cases(6)[network], mode, torch.contiguous_format)


@pytest.mark.filterwarnings("ignore")
def test_that_holds_for_a_network_whose_gradients_are_clipped_as_factors() -> None:
    torch.manual_seed(0)
    case = private_step.coloured_case(6, ModelSettings(name="resnet9", width=4))
    private_step.check(case, "ghost", torch.contiguous_format)


@pytest.mark.filterwarnings("ignore")
def test_our_private_step_is_the_mean_of_clipped_gradients_taken_row_by_row() -> None:
    torch.manual_seed(0)
    case = private_step.cases(6)["F"]

    def by_hand(case: private_step.Case) -> Callable[[], None]:
        network, criterion = case.new(), case.criterion()
        parameters = list(network.parameters())
        total = [torch.zeros_like(parameter) for parameter in parameters]
        for row in range(6):
            network.zero_grad()
            criterion(network(case.inputs[0][row, None]), case.target[row, None]).backward()
            norm = (
                float(sum(p.grad.square().sum() for p in parameters if p.grad is not None)) ** 0.5
            )
            for sum_, parameter in zip(total, parameters, strict=True):
                assert parameter.grad is not None
                sum_ += parameter.grad * min(1.0, private_step.CLIP / norm)

        def step() -> None:
            with torch.no_grad():
                for sum_, parameter in zip(total, parameters, strict=True):
                    parameter.sub_(sum_, alpha=private_step.RATE / 6)

        return step

    ours = private_step.moved(case, lambda case: private_step.our_step(case, 0.0))
    hand = private_step.moved(case, by_hand)
    assert float((ours - hand).norm()) < private_step.APART * float(hand.norm())
    # the control: clipping is part of what is compared
    unclipped = private_step.moved(case, private_step.open_step)
    assert float((ours - unclipped).norm()) > 0.1 * float(hand.norm())


@pytest.mark.filterwarnings("ignore")
def test_an_opacus_mode_with_another_step_is_omitted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    case = private_step.cases(6)["F"]
    true_step = private_step.opacus_step

    def clips_less(*given: Any) -> Callable[[], None]:
        with monkeypatch.context() as there:
            there.setattr(private_step, "CLIP", 2.0)
            return true_step(*given)

    monkeypatch.setattr(private_step, "opacus_step", clips_less)
    with pytest.raises(ValueError, match="its clipped gradient is another"):
        private_step.check(case, "hooks", torch.contiguous_format)


def test_operations_of_a_step_are_those_of_its_products_forward_and_backward() -> None:
    rows = 3
    forward = [
        2 * rows * products
        for products in (28**2 * 16 * 25, 14**2 * 32 * 9 * 16, 7**2 * 64 * 9 * 32, 576 * 10)
    ]
    # Backward: the gradient of weights costs as much, and that of inputs, but for the first's.
    expected = 3 * sum(forward) - forward[0]
    assert hot_loop.Step(hot_loop.SMALL, rows, "float32").operations() == expected


def test_step_times_are_printed_for_each_network_and_precision(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hot_loop, "STEPS", [(hot_loop.SMALL, 2), (hot_loop.LENET, 3)])
    monkeypatch.setattr(hot_loop, "SIDES", (8,))
    monkeypatch.setattr(hot_loop, "ENOUGH", 0.0)
    assert hot_loop.main(["--passes", "1", "--precisions", "float32"]) == 0
    told = [line.split(" | ")[:3] for line in capsys.readouterr().out.splitlines()]
    assert told[-2:] == [["| small_cnn", "16", "2"], ["| lenet", "16", "3"]]


# Other programs ------------------------------------------------------------------------------

#: Allocate 50 MB for some seconds, print one line, and leave a process that has left its group and
#: lost its parent.
LEAVES_ONE = """
import subprocess, sys, time
from benchmarks.processes import tell
quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
child = subprocess.Popen(["sleep", "600"], start_new_session=True, **quiet)
taken = b"x" * 50_000_000
time.sleep(float(sys.argv[1]))
tell(child=child.pid)
"""


@pytest.mark.slow
def test_a_measurement_leaves_no_process_of_its_program_running(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environment = {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", LEAVES_ONE]
    told = carry_out([[*command, "2"]], [environment], limit=300)
    assert told.status == 0 and 50 < told.peak_pss < 200
    assert not _alive(told.lines[0]["child"])
    # the control
    monkeypatch.setattr(processes, "end_all", lambda word: None)
    left = carry_out([[*command, "0"]], [environment], limit=300).lines[0]["child"]
    assert _alive(left)
    os.kill(left, signal.SIGKILL)


def test_parallel_commands_share_a_session_and_so_one_share_of_the_cores(
    tmp_path: Path,
) -> None:
    files = [tmp_path / "one", tmp_path / "other"]
    note = "import os, sys; open(sys.argv[1], 'w').write(str(os.getsid(0)))"
    told = carry_out([[sys.executable, "-c", note, str(f)] for f in files], [{}, {}], limit=300)
    assert told.status == 0
    assert [int(file.read_text()) for file in files] == [os.getsid(0)] * 2


@pytest.mark.slow
def test_a_program_is_ended_at_its_time_limit() -> None:
    told = carry_out([["sleep", "60"]], [{}], limit=0.5)
    assert told.status == -signal.SIGKILL


def _alive(process: int) -> bool:
    """Running: neither gone nor a zombie."""
    with contextlib.suppress(OSError):
        return "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text()
    return False


@pytest.mark.parametrize(
    ("benchmark", "words", "said"),
    [
        (rounds, ["configs/fedssl.yaml", "--rounds", "0"], "whole number from 1 is needed, not 0"),
        (rounds, ["run.seed=1"], "which config?"),
        (batched_agents, ["configs/semifl.yaml", "--at-once", "1,x"], "is needed, not x"),
        (batched_agents, ["run.seed=1"], "which config?"),
        (scale, ["configs/semifl.yaml", "--rounds", "1"], "from 2 is needed, not 1"),
        (private_step, ["--width", "4"], "--width needs --classifier"),
        (against_flower_and_pfl, ["--only", "nobody"], "matches no framework"),
    ],
)
def test_invalid_arguments_are_refused_before_any_measurement(
    benchmark: Any, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        benchmark.main(words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("benchmark", [rounds, batched_agents])
def test_an_unknown_phase_is_refused_with_the_phases_of_the_config(
    benchmark: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(ROOT / "configs" / "fedtrinet.yaml")
    assert benchmark.main([config, "--rounds", "1", "--phase", "nosuch"]) == 2
    said = capsys.readouterr().err
    assert "there is no phase nosuch. Phases: labels, three players" in said


@pytest.mark.slow
def test_an_invalid_config_ends_the_scale_benchmark_without_a_traceback(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert scale.main(["configs/nope.yaml", "--agents", "10", "--rounds", "2"]) == 2
    said = capfd.readouterr().err
    assert "configs/nope.yaml" in said and "Traceback" not in said
