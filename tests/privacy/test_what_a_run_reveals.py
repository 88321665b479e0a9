"""What a private run reveals besides its weights: neither which rows were drawn, nor their number.

With a learning rate that rounds to zero no weight moves, and with fixed noise nothing is random.
Two runs that differ in drawn rows or row counts must then write the same output. Times and local
folders are removed first.
"""

import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
    EventAccumulator,
)
from torch import Tensor

from privssl import data
from privssl.algorithms.fedssl import losses
from privssl.algorithms.fedssl.algorithm import FedSSL
from privssl.core.agents import Agent, LabelledRows
from privssl.core.messages import Ack, Reply, serialize
from privssl.engines.local import LocalEngine
from privssl.errors import PrivacyError
from privssl.experiment import config
from privssl.experiment.prepare import prepare
from privssl.privacy import plan as privacy_plan
from privssl.privacy import secure_noise
from tests.support.command_line import command
from tests.support.private_fedssl import PRIVATE, accounts, context, visit
from tests.support.toy_worlds import without_noise

NOTHING_MOVES = (
    *("privacy.learning_rate=1.0e-60", "privacy.record_counts=private", "run.images_every=1"),
    *("algorithm.rounds=1", "run.evaluate_every=1", "data.validation=4", "data.name=image_folder"),
)


MARK = b"CANARY-0x5eed"  # begins every training image


NAME = "canary-class"  # begins the name of every class


# The meaning of outputs is public; warnings and metrics of test rows also name classes.
NAMES_CLASSES = (
    *("results.json", "classifier.safetensors", "train.log", "metrics.csv", "confusion.csv"),
    *("model_card.md", "snapshot.json"),
)


def marked_images(root: Path) -> NDArray[np.uint8]:
    """A folder of 8x8 images in three classes. Returns the test images (N, 8, 8)."""
    rng = np.random.default_rng(0)
    tests = []
    for part, count in (("train", 21), ("test", 4)):
        for label in "abc":
            folder = root / part / f"{NAME}-{label}"
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 256, 64, dtype=np.uint8)
                if part == "train":
                    pixels[: len(MARK)] = np.frombuffer(MARK, np.uint8)
                else:
                    tests.append(pixels.reshape(8, 8))
                Image.fromarray(pixels.reshape(8, 8)).save(folder / f"{number:02}.png")
    return np.stack(tests)


class OpenedFiles:
    """Every file that this process opens for writing, while ``paths`` is a list."""

    paths: list[str] | None = None


def _record_opened(event: str, details: Any) -> None:
    writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT
    if event != "open" or OpenedFiles.paths is None:
        return
    path, _, flags = details
    if isinstance(flags, int) and flags & writes and isinstance(path, str | bytes | os.PathLike):
        OpenedFiles.paths.append(os.fsdecode(path))


# An audit hook cannot be removed, so it checks OpenedFiles.paths first.
sys.addaudithook(_record_opened)


class Output:
    """All output of a run without times: files, messages and screen."""

    def __init__(self, folder: Path, traffic: list[Any], screen: str) -> None:
        self.files: dict[str, Any] = {}
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            name = str(path.relative_to(folder))
            if not name.startswith("tensorboard/"):
                self.files[name] = timeless(path)
        self.files |= curves(folder / "tensorboard")
        self.traffic, self.screen = traffic, re.sub(r"\d+:\d\d:\d\d|\d+ s\b", "", screen)

    def differences(self, other: "Output") -> list[str]:
        names = sorted(self.files.keys() | other.files.keys())
        found = [name for name in names if self.files.get(name) != other.files.get(name)]
        found += ["traffic"] * (self.traffic != other.traffic)
        return found + ["screen"] * (self.screen != other.screen)


def timeless(path: Path) -> Any:
    if path.name == "train.log":
        return re.sub(r"(?m)^\S+ \S+ ", "", path.read_text())
    if path.name not in ("results.json", "snapshot.json"):
        return path.read_bytes()
    found = json.loads(path.read_text())
    found.pop("seconds", None)
    found.get("extra", {}).get("mapping", {}).pop("seconds", None)
    found.pop("sha256", None)  # of what is in the file, seconds included
    return found


def curves(folder: Path) -> dict[str, Any]:
    """The points and pictures of TensorBoard, by tag."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0}).Reload()
    tags = events.Tags()
    scalars = [tag for tag in tags["scalars"] if not tag.startswith("time/")]
    points: dict[str, Any] = {t: [(e.step, e.value) for e in events.Scalars(t)] for t in scalars}
    for tag in tags["images"]:
        points[tag] = [(e.step, e.encoded_image_string) for e in events.Images(tag)]
    return points


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, NDArray[np.uint8]]:
    root = tmp_path_factory.mktemp("images")
    return root, marked_images(root)


class Runs:
    """Makes runs that differ only in their arguments."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root, self.folder, self.count = root, folder, 0
        self.shown: list[Tensor] = []  # rows in pictures
        self.labels: list[Tensor] = []  # labels of the agents

    def run(self, *, drawn: bool = True, fewer: bool = False, plant: Any = None) -> Output:
        self.count += 1
        here = self.folder / str(self.count)
        here.mkdir()
        (here / "tiny.yaml").write_text(PRIVATE)
        traffic: list[Any] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(here)
            chance = 0.0 if drawn else np.nextafter(1.0, 0.0)
            patch.setattr(secure_noise, "secure_uniform", lambda count: np.full(count, chance))
            without_noise(patch)
            patch.setattr(os, "urandom", lambda count: bytes(count))
            self._listen(patch, traffic, fewer)
            if plant is not None:
                plant(patch)
            given = [f"data.root={self.root}", "run.output=run", *NOTHING_MOVES]
            ended = command("tiny.yaml", *given, "--json")
        assert ended.status == 0, ended
        results = json.loads(ended.out)
        results.pop("seconds")
        return Output(here / "run", traffic, json.dumps(results) + ended.err)

    def _listen(self, patch: pytest.MonkeyPatch, traffic: list[Any], fewer: bool) -> None:
        deliver, pictured, build = LocalEngine.deliver, FedSSL.pictures, data.build

        def record(self: LocalEngine, calls: Any) -> list[Reply[Any]]:
            replies = list(deliver(self, calls))
            for call, reply in zip(calls, replies, strict=True):
                sent = serialize(Ack() if reply.declined else reply.payload)
                told = (reply.weight, dict(reply.metrics)) if reply.sender.id[0] == "s" else ()
                traffic.append((call.key, serialize(call.message), sent, told))
            return replies

        def show(algorithm: FedSSL, state: Any, x: Tensor, y: Tensor) -> Any:
            self.shown.append(x)
            return pictured(algorithm, state, x, y)

        def build_fewer(*given: Any, **named: Any) -> data.FederatedDataset:
            parties = build(*given, **named)
            for agent in [a for a in parties.agents if a.held_labelled is not None]:
                self.labels.append(agent.labelled.y)
                if fewer and agent.id == "s0":
                    take_last(agent)
            return parties

        patch.setattr(LocalEngine, "deliver", record)
        patch.setattr(FedSSL, "pictures", show)
        patch.setattr(data, "build", build_fewer)


def take_last(agent: Agent) -> None:
    rows = agent.labelled
    agent.held_labelled = LabelledRows(rows.x[:-1], rows.y[:-1], rows.ids[:-1])


@pytest.fixture(scope="module")
def runs(images: tuple[Path, NDArray[np.uint8]], tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(images[0], tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def whole(runs: Runs) -> Iterator[Output]:
    """The output with all rows in every batch. OpenedFiles.paths lists every file opened for
    writing.
    """
    OpenedFiles.paths = []
    told = runs.run()
    written, OpenedFiles.paths = OpenedFiles.paths, None
    runs.written = written  # type: ignore[attr-defined]
    yield told


def test_the_output_besides_the_weights_does_not_depend_on_the_drawn_rows(
    runs: Runs, whole: Output
) -> None:
    assert whole.differences(runs.run(drawn=False)) == []


def test_with_private_counts_the_output_besides_the_weights_does_not_depend_on_a_row_less(
    runs: Runs, whole: Output, configured: Callable[..., config.Config]
) -> None:
    assert whole.differences(runs.run(fewer=True)) == []
    # The control: with public counts the plan, and with it each ledger, contains the number.
    promises = [
        prepare(configured(f"privacy.record_counts={counts}")).account_plans["s0"].n_public
        for counts in ("private", "public")
    ]
    assert promises == [None, 12]


def test_the_comparison_of_outputs_detects_a_batch_size_in_the_log(
    runs: Runs, whole: Output
) -> None:
    def plant(patch: pytest.MonkeyPatch) -> None:
        import logging

        real = privacy_plan.PrivatePlan.draw_batch

        def log_batch_size(self: Any, rows: int) -> Tensor:
            mask = real(self, rows)
            logging.getLogger("privssl").info("batch of %d", int(mask.sum()))
            return mask

        patch.setattr(privacy_plan.PrivatePlan, "draw_batch", log_batch_size)

    assert whole.differences(runs.run(drawn=False, plant=plant)) == ["train.log"]


def traces(labels: list[Tensor]) -> list[bytes]:
    """Pixels, class names and labels, in every form that a file could contain."""
    found = [MARK, ", ".join(map(str, MARK)).encode(), NAME.encode()]
    for y in labels:
        assert len(set(y.tolist())) > 1  # equal labels could occur in a file by chance
        found += [y.numpy().astype(kind).tobytes() for kind in ("u1", "<i4", "<i8", "<f4")]
        found += [str(y.tolist())[1:-1].encode(), "".join(map(str, y.tolist())).encode()]
    return found


def test_no_file_name_message_or_screen_contains_a_pixel_a_label_or_a_class_name(
    runs: Runs, whole: Output
) -> None:
    sought, folder = traces(runs.labels[:2]), runs.folder / "1/run"
    written = [path for path in folder.rglob("*") if path.is_file()]
    assert len(written) > 12
    for path in written:
        told = str(path).encode() + path.read_bytes()
        if path.name in NAMES_CLASSES or path.parent.name == "tensorboard":
            told = told.replace(NAME.encode(), b"")
        assert [trace for trace in sought if trace in told] == [], path
    sent = [part for key, down, up, _ in whole.traffic for part in (key.encode(), down, up)]
    told = b"".join([*sent, whole.screen.replace(NAME, "").encode()])  # --json: results.json
    assert [trace for trace in sought if trace in told] == []
    # The control: the labels themselves contain every searched string.
    assert all(trace in b"".join(traces(runs.labels[:2])) for trace in sought)
    split = (folder / "split.json").read_bytes()
    assert b'"s0"' in split  # the file was read, and it contains row numbers, not labels


def test_pictures_show_held_out_rows_only(
    runs: Runs, whole: Output, images: tuple[Path, NDArray[np.uint8]]
) -> None:
    held_out = {row.tobytes() for row in images[1]}

    def are_held_out(x: Tensor) -> bool:
        pixels = ((x + 1) * 127.5).round().byte().numpy()
        return {row.tobytes() for row in pixels[:, 0]} <= held_out

    assert runs.shown and all(map(are_held_out, runs.shown))
    moved = runs.shown[0].clone()
    moved[0] = 0.0
    assert not are_held_out(moved)


def test_a_private_run_writes_nothing_outside_its_folder(runs: Runs, whole: Output) -> None:
    folder = runs.folder / "1/run"
    written: list[str] = runs.written  # type: ignore[attr-defined]
    inside = [(runs.folder / "1" / path).is_relative_to(folder) for path in written]
    # Python's cache of newly imported modules, and /dev/null.
    others = [p for p, ours in zip(written, inside, strict=True) if not ours]
    config_of_this_test = [str(runs.folder / "1/tiny.yaml")]
    others = [p for p in others if "__pycache__" not in p and p != os.devnull]
    assert others == config_of_this_test
    assert sum(inside) > 12  # the control: the run's own files are recorded


def test_the_traceback_of_a_crash_in_a_private_visit_contains_no_row(
    configured: Callable[..., config.Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = prepare(configured())

    def crash(cfg: object, functions: object, batch: losses.MixupBatch, *_: object) -> Tensor:
        return torch.cat([batch.mild, batch.p1])  # the shapes do not fit

    monkeypatch.setattr(losses, "mixing_losses", crash)
    with accounts(prepared, tmp_path) as agents, pytest.raises(PrivacyError) as crashed:
        pixels = agents["s0"].labelled.x[:, 0, 0, :4]
        visit(prepared, agents["s0"], context("s0"))
    text = "".join(traceback.format_exception(crashed.value))
    assert "fails on labelled rows: RuntimeError in " in text
    for row in pixels.tolist():
        assert ", ".join(map(str, row)) not in text
