"""The mechanism against the specification's tests 17 to 25, where the other files leave a gap.

tests/privacy/test_dp_sgd.py has the mechanism on small problems and
tests/privacy/test_private_fedssl.py whole runs. Here: sensitivity of a whole visit, isolation in
the joint loss, the second opinion of Opacus' hooks on G and D, batches that are empty, and what a
run writes when all that differs is which rows were drawn or how many there are.
"""

import copy
import json
import math
import os
import re
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from opacus.grad_sample import GradSampleModule
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
    EventAccumulator,
)
from torch import Tensor, nn

from accounting.ledger import read_journal
from generators.objectives import discriminator_loss
from privssl import data
from privssl.algorithms import ALGORITHMS
from privssl.algorithms.fedssl import losses
from privssl.algorithms.fedssl.algorithm import FedSSL, FedSSLUpdate
from privssl.core.agents import Agent, LabelledRows
from privssl.core.engine import Call
from privssl.core.messages import Ack, Reply, serialize
from privssl.engines.local import LocalEngine
from privssl.errors import ConfigError, DataError, PrivacyError
from privssl.experiment import config
from privssl.experiment.prepare import prepare
from privssl.models import build_classifier
from privssl.privacy import plan as privacy_plan
from privssl.privacy import secure_noise
from privssl.privacy.dp_sgd import PrivateTraining
from privssl.privacy.noisy_optimizer import SecureNoise
from privssl.privacy.per_example_gradients import per_example_gradients
from privssl.privacy.secure_noise import secure_normal
from privssl.runs import checkpoint, round_loop
from privssl.settings.schema import ModelSettings
from privssl.training.batched.deferred import FunctionalModule
from tests.support.command_line import command
from tests.support.privacy import (
    CLASSES,
    SHAPE,
    draw_rows,
    frequency_is,
    joint_loss,
    largest_correlation,
    mixing,
    networks,
    parameters_of,
    plan,
    repeats,
)
from tests.support.private_fedssl import PRIVATE, accounts, carry_out, context, lesson, visit
from tests.support.specification_mechanism import (
    ALL,
    CLIP,
    ONE_STEP,
    header,
    tensor_names,
    visit_with,
    with_row,
    without_row,
)
from tests.support.toy_worlds import without_noise


@pytest.fixture
def configured(tmp_path: Path) -> Callable[..., config.Config]:
    def load(*overrides: str) -> config.Config:
        path = tmp_path / "tiny.yaml"
        path.write_text(PRIVATE)
        return config.load_config(path, overrides)

    return load


@pytest.fixture
def no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    without_noise(monkeypatch)


def shift(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """How far two neighbours' sums are apart, in clip norms."""
    apart = torch.cat([(one[key].double() - other[key].double()).flatten() for key in one])
    return float(apart.norm()) / 1000 * 12 / CLIP  # learning rate, public divisor


@pytest.mark.usefixtures("no_noise")
@pytest.mark.parametrize("protect", ["F", "FG", "FDG"])
@pytest.mark.parametrize("value", [0.3, 1e15])
def test_a_row_that_is_nulled_moves_what_a_visit_releases_by_at_most_the_clip_norm(
    protect: str, value: float, configured: Callable[..., config.Config], tmp_path: Path
) -> None:
    named = f"[{', '.join(protect)}]"
    chosen = (f"privacy.update_at_support={named}", f"privacy.protect={named}")
    prepared = prepare(configured(*ONE_STEP, *chosen))
    came = lesson(prepared)
    whole = visit_with(prepared, tmp_path / "1", with_row(value), came)
    nulled = visit_with(prepared, tmp_path / "2", with_row(math.nan), came)
    assert shift(whole, nulled) <= 1 + 1e-4
    if value == 0.3:
        assert shift(whole, nulled) > 0.5  # such a row is clipped, so the bound is reached


@pytest.mark.usefixtures("no_noise")
@pytest.mark.parametrize(("counts", "bounded"), [("private", True), ("public", False)])
def test_with_private_counts_a_row_less_moves_it_by_at_most_the_clip_norm(
    counts: str, bounded: bool, configured: Callable[..., config.Config], tmp_path: Path
) -> None:
    # The negative control: where counts are public, no neighbour has a row less, and the draws
    # of the rows after it may change with it. They do, by more than one clip norm.
    prepared = prepare(configured(*ONE_STEP, *ALL, f"privacy.record_counts={counts}"))
    came = lesson(prepared)
    whole = visit_with(prepared, tmp_path / "1", lambda rows: rows, came)
    fewer = visit_with(prepared, tmp_path / "2", without_row, came)
    assert (shift(whole, fewer) <= 1 + 1e-4) == bounded


# 18: isolation ------------------------------------------------------------------------------------


def shipped_classifiers() -> list[ModelSettings]:
    """Every classifier that a private run can name."""
    hints = get_type_hints(ModelSettings)
    norms = [norm for norm in get_args(hints["norm"]) if norm not in ("batch", "static")]
    names = [name for name in get_args(hints["name"]) if name != "trinet_cnn"]  # it has dropout
    return [ModelSettings(name, 4, norm) for name in names for norm in norms]


@pytest.mark.parametrize("norm", ["group", "none"])
def test_dropout_is_refused_when_the_config_is_read_and_by_its_layers_name(
    configured: Callable[..., config.Config], norm: Any
) -> None:
    with pytest.raises(ConfigError, match="trinet_cnn has dropout"):
        configured("model.name=trinet_cnn")
    good = configured()
    object.__setattr__(good, "model", ModelSettings("trinet_cnn", 4, norm))
    with pytest.raises(PrivacyError, match=r"F\.deep\.3 \(Dropout\)"):
        prepare(good)


@pytest.mark.parametrize("model", shipped_classifiers(), ids=lambda m: f"{m.name}-{m.norm}")
@pytest.mark.parametrize("value", [0.5, 1e30, math.nan])
def test_in_the_joint_loss_another_row_leaves_a_rows_gradient_bit_equal(
    model: ModelSettings, value: float
) -> None:
    nets = {**networks(), "F": build_classifier(model, SHAPE, CLASSES)}
    loss, fields = joint_loss(nets, ("F", "G", "D")), mixing(rows=4, views=2)
    before = per_example_gradients(loss, parameters_of(nets), fields)
    changed = {key: field.clone() for key, field in fields.items()}
    changed["mild"][2], changed["strong"][2] = value, value
    after = per_example_gradients(loss, parameters_of(nets), changed)
    others = torch.tensor([0, 1, 3])
    pairs = [(before[n][k], after[n][k]) for n in before for k in before[n]]
    assert all(torch.equal(a[others], b[others]) for a, b in pairs)
    assert any(not torch.equal(a[2], b[2]) for a, b in pairs)  # the control: its own does move


def test_a_batch_norm_in_a_frozen_network_is_refused_by_name_when_the_plan_is_made(
    configured: Callable[..., config.Config],
) -> None:
    only_g = ["privacy.update_at_support=[G]", "privacy.protect=[G]"]
    prepare(configured(*only_g))  # nothing else is wrong with it
    good = configured(*only_g)
    object.__setattr__(good, "model", ModelSettings("small_cnn", 4, "batch"))
    with pytest.raises(PrivacyError, match=r"F\.trunk\.2 \(BatchNorm2d\)"):
        prepare(good)


# 19: a second opinion on G and D ------------------------------------------------------------------


def hooked_gradients(network: nn.Module, loss: Callable[[nn.Module], Tensor]) -> dict[str, Tensor]:
    """Per-row gradients by Opacus' hooks; the loss is the sum over rows."""
    wrapped = GradSampleModule(copy.deepcopy(network), loss_reduction="sum")
    loss(wrapped).backward()  # type: ignore[no-untyped-call]
    return {name: p.grad_sample for name, p in wrapped._module.named_parameters()}


def assert_alike(found: Any, expected: dict[str, Tensor]) -> None:
    rounding = 1e-9 * max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=rounding)


# Opacus registers hooks in a way that torch has announced to change.
hooks = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


@hooks
def test_gradients_of_the_generator_equal_those_of_opacus_hooks() -> None:
    network = networks()["G"].double()
    f = {k: v[:, 0] for k, v in mixing(rows=5, views=1, dtype=torch.float64).items()}

    def row(parameters: Any, r: Any) -> Tensor:
        given = [r[key][None] for key in ("mild", "p1", "p2", "z", "lam")]
        made = FunctionalModule(network, parameters["G"])(*given[:4], given[4][:, None])
        total: Tensor = made.square().sum()
        return total

    found = per_example_gradients(row, parameters_of({"G": network}), f)["G"]
    given = (f["mild"], f["p1"], f["p2"], f["z"], f["lam"][:, None])
    assert_alike(found, hooked_gradients(network, lambda G: G(*given).square().sum()))


@hooks
def test_gradients_of_a_discriminator_that_one_loss_uses_twice_equal_those_of_opacus_hooks() -> (
    None
):
    nets = {name: net.double() for name, net in networks().items()}
    fields = mixing(rows=5, views=1, dtype=torch.float64)
    f = {key: value[:, 0] for key, value in fields.items()}
    found = per_example_gradients(joint_loss(nets, ("D",)), parameters_of({"D": nets["D"]}), fields)
    with torch.no_grad():  # Eq. 6: D sees the mix and its mixed label p'
        x_hat = nets["G"](f["mild"], f["p1"], f["p2"], f["z"], f["lam"][:, None])[:, 0]
        mixed = f["lam"][:, None] * f["p1"] + (1 - f["lam"][:, None]) * f["p2"]

    def loss(D: nn.Module) -> Tensor:
        return discriminator_loss(D(f["mild"], f["p1"]), D(x_hat, mixed), f["lam"]).sum()

    assert_alike(found["D"], hooked_gradients(nets["D"], loss))

    def wrong(D: nn.Module) -> Tensor:  # the control: D sees the mix once less
        return discriminator_loss(D(f["mild"], f["p1"]), torch.zeros(5).double(), f["lam"]).sum()

    with pytest.raises(AssertionError):
        assert_alike(found["D"], hooked_gradients(nets["D"], wrong))


# 20: what a sound visit sends ---------------------------------------------------------------------


@pytest.mark.parametrize("model", shipped_classifiers(), ids=lambda m: f"{m.name}-{m.norm}")
def test_no_network_that_can_be_protected_has_a_buffer_that_could_travel(
    model: ModelSettings, configured: Callable[..., config.Config]
) -> None:
    chosen = (f"model.name={model.name}", f"model.norm={model.norm}")
    nets = prepare(configured(*ALL, *chosen)).algorithm.networks()
    assert [name for name, net in nets.items() if list(net.buffers())] == []
    assert list(networks(spectral=True)["D"].buffers())  # the control: a buffer is seen


def test_on_the_wire_a_sound_visit_is_its_parameters_a_weight_of_one_and_no_notes(
    configured: Callable[..., config.Config], tmp_path: Path
) -> None:
    two = ("privacy.update_at_support=[F, G]", "privacy.protect=[F, G]")
    prepared = prepare(configured(*two))
    assert isinstance(prepared.algorithm, FedSSL)
    with accounts(prepared, tmp_path) as agents:
        engine = LocalEngine(list(agents.values()), seed=0, device=torch.device("cpu"))
        step = prepared.algorithm.support_pass
        [reply] = list(engine.deliver([Call(agents["s0"].ref, step, lesson(prepared), 1)]))
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
    }


# 21: empty and full batches -----------------------------------------------------------------------


def test_a_visit_in_which_no_row_was_drawn_is_charged_and_sends_its_noise(
    configured: Callable[..., config.Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw_rows(monkeypatch, [False] * 12)
    monkeypatch.setattr(secure_noise, "secure_normal", np.ones)
    prepared = prepare(configured("privacy.learning_rate=1.0", "privacy.average_last=0.0"))
    came = lesson(prepared)
    with accounts(prepared, tmp_path) as agents:
        sent = visit(prepared, agents["s0"], context("s0"))
        account = agents["s0"].account
        assert account is not None and account.visits() == 1 and account.spent() > 0
    assert isinstance(sent, FedSSLUpdate) and sent.F is not None
    # Two steps of noise 4.0 x clip norm 1 x 1, each divided by the public 0.5 x 12 rows.
    for key, value in sent.F.items():
        torch.testing.assert_close(came.F[key] - value, torch.full_like(value, 8 / 6))


@pytest.mark.parametrize("rows", [0, 1])
def test_an_agent_with_one_row_or_none_takes_its_steps_like_any_other(
    rows: int, configured: Callable[..., config.Config], tmp_path: Path
) -> None:
    prepared = prepare(configured("privacy.record_counts=private"))
    came = lesson(prepared)

    def first(held: LabelledRows) -> LabelledRows:
        return LabelledRows(held.x[:rows], held.y[:rows], held.ids[:rows])

    sent = visit_with(prepared, tmp_path / "visit", first, came)
    assert all(bool(value.isfinite().all()) for value in sent.values())
    assert all(not torch.equal(value, came.F[key[2:]]) for key, value in sent.items())
    assert len(read_journal(tmp_path / "visit/s0.jsonl").visits) == 1


def test_who_holds_no_labelled_row_has_no_account_and_is_never_visited(
    configured: Callable[..., config.Config],
) -> None:
    prepared = prepare(configured())
    assert (
        {agent.id for agent in prepared.labelled_agents}
        == set(prepared.account_plans)
        == {"s0", "s1"}
    )
    assert all(agent.account is None for agent in prepared.federated_data.agents)


@pytest.mark.parametrize("rate", ["1.0001", "8.0", "0.0", "-0.5"])
def test_more_rows_in_a_batch_than_there_are_is_refused_and_not_silently_all_of_them(
    rate: str, configured: Callable[..., config.Config]
) -> None:
    with pytest.raises(ConfigError, match=r"it is a probability in \(0, 1\]"):
        configured(f"privacy.sample_rate={rate}")
    configured("privacy.sample_rate=1.0")


@pytest.mark.parametrize("rows", [3, 256])
def test_an_empty_step_computes_as_many_gradients_as_a_full_one(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What can be timed: for up to 256 rows it does not depend on how many were drawn.
    def work(drawn: bool) -> list[int]:
        sizes: list[int] = []
        draw_rows(monkeypatch, [drawn] * rows)
        network = nn.Linear(2, 1, bias=False)

        def fields_of(picked: Tensor, step: int) -> dict[str, Tensor]:
            sizes.append(len(picked))
            return {"x": torch.ones(len(picked), 2)}

        def loss(parameters: Any, row: Any) -> Tensor:
            return (parameters["F"]["weight"] * row["x"]).sum()  # type: ignore[no-any-return]

        PrivateTraining(plan(sample_rate=0.5), {"F": network}).run(rows, fields_of, loss)
        return sizes

    assert work(True) == work(False)
    assert sum(work(True)) == rows


# 22: noise ----------------------------------------------------------------------------------------


def coupling(halves: NDArray[np.float64]) -> float:
    """Largest correlation between the two numbers that Box and Muller make of one pair: of
    themselves and of their squares, which a shared radius or angle would show. (2, N)."""
    one, other = halves
    found = [np.corrcoef(one, other)[0, 1], np.corrcoef(one**2, other**2)[0, 1]]
    return max(abs(float(value)) for value in found)


def test_the_two_numbers_of_a_pair_are_independent() -> None:
    pairs = 500_000
    normal: NDArray[np.float64] = secure_normal(2 * pairs).reshape(2, pairs)
    six_sigma = 6 / math.sqrt(pairs)
    assert coupling(normal) < six_sigma
    first = normal[0, :]
    sign = np.where(np.arange(pairs) % 2, 1.0, -1.0)
    assert coupling(np.stack([first, first * sign])) > six_sigma  # the control: one radius


def test_two_resumes_from_one_checkpoint_draw_other_noise(
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
        seeded = np.random.default_rng(0)  # as one that a checkpoint brings back

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


# 23: Poisson --------------------------------------------------------------------------------------

HELD, DRAWS = 6, 300


def rows_in_sums(poisson: privacy_plan.PrivatePlan) -> NDArray[np.float64]:
    """Which rows took part in each sum that was released (steps, rows), read off the sums before
    their noise: row i has the gradient e_i."""
    sums: list[NDArray[np.float64]] = []
    add_noise = SecureNoise.add_noise

    def look(self: Any) -> None:
        sums.append(self.params[0].summed_grad.detach().numpy().copy())
        add_noise(self)

    network = nn.Linear(HELD, 1, bias=False)
    unit = torch.eye(HELD)

    def loss(parameters: Any, row: Any) -> Tensor:
        return (parameters["F"]["weight"][0] * row["x"]).sum()  # type: ignore[no-any-return]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SecureNoise, "add_noise", look)
        PrivateTraining(poisson, {"F": network}).run(HELD, lambda p, step: {"x": unit[p]}, loss)
    return np.concatenate(sums).round()


def test_rows_take_part_in_released_sums_by_the_sample_rate_and_independently(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    poisson = plan(sample_rate=0.3, steps=DRAWS)
    part = rows_in_sums(poisson)
    assert part.shape == (DRAWS, HELD)
    assert frequency_is(part, 0.3) and largest_correlation(part) < 6 / math.sqrt(DRAWS)

    # The control: batches of two shuffled rows have the right rate, and are not Poisson.
    def shuffled(self: Any, rows: int) -> Tensor:
        return torch.randperm(rows) < 2

    monkeypatch.setattr(privacy_plan.PrivatePlan, "draw_batch", shuffled)
    part = rows_in_sums(poisson)
    # Negative correlation of every pair: the size of a batch has no variance at all.
    assert frequency_is(part, 1 / 3) and part.sum(axis=1).std() == 0


@pytest.mark.parametrize(
    "key", ["sampler", "loader", "shuffle", "weights", "batch_size", "replace"]
)
def test_no_config_puts_another_sampler_in_the_place_of_ours(
    key: str, configured: Callable[..., config.Config]
) -> None:
    with pytest.raises(ConfigError, match=f"privacy.{key} .*unknown key"):
        configured(f"privacy.{key}=1")


# 24 and 25: what a run tells besides its weights --------------------------------------------------
#
# With a learning rate that rounds to zero no weight moves, and with fixed noise nothing is random.
# Then everything that two runs write must be the same, whatever was drawn or held; a number that
# differs is one that leaks. Times and the folders of this machine are taken out first.

NOTHING_MOVES = (
    *("privacy.learning_rate=1.0e-60", "privacy.record_counts=private", "run.images_every=1"),
    *("algorithm.rounds=1", "run.evaluate_every=1", "data.validation=4", "data.name=image_folder"),
)
MARK = b"CANARY-0x5eed"  # begins every training image
NAME = "canary-class"  # begins the name of every class
# What outputs stand for is public, and who uses the weights needs it; no other file has it.
NAMES_CLASSES = ("results.json", "classifier.safetensors")


def marked_images(root: Path) -> NDArray[np.uint8]:
    """A folder of 8x8 images in three classes; returns those for testing (N, 8, 8)."""
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


class Watch:
    """Every file that this process opens to write, while ``paths`` is a list."""

    paths: list[str] | None = None


def _watch(event: str, details: Any) -> None:
    writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT
    if event != "open" or Watch.paths is None:
        return
    path, _, flags = details
    if isinstance(flags, int) and flags & writes and isinstance(path, str | bytes | os.PathLike):
        Watch.paths.append(os.fsdecode(path))


sys.addaudithook(_watch)  # cannot be taken away, so it looks at Watch first


class Told:
    """All that a run tells: its files, its messages and its screen, without times."""

    def __init__(self, folder: Path, traffic: list[Any], screen: str) -> None:
        self.files: dict[str, Any] = {}
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            name = str(path.relative_to(folder))
            if not name.startswith("tensorboard/"):
                self.files[name] = timeless(path)
        self.files |= curves(folder / "tensorboard")
        self.traffic, self.screen = traffic, re.sub(r"\d+:\d\d:\d\d|\d+ s\b", "", screen)

    def differences(self, other: "Told") -> list[str]:
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
    """Makes runs that differ in nothing but what is planted."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root, self.folder, self.count = root, folder, 0
        self.shown: list[Tensor] = []  # rows in pictures
        self.labels: list[Tensor] = []  # of agents

    def run(self, *, drawn: bool = True, fewer: bool = False, plant: Any = None) -> Told:
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
        return Told(here / "run", traffic, json.dumps(results) + ended.err)

    def _listen(self, patch: pytest.MonkeyPatch, traffic: list[Any], fewer: bool) -> None:
        deliver, pictured, build = LocalEngine.deliver, FedSSL.pictures, data.build

        def hear(self: LocalEngine, calls: Any) -> list[Reply[Any]]:
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

        patch.setattr(LocalEngine, "deliver", hear)
        patch.setattr(FedSSL, "pictures", show)
        patch.setattr(data, "build", build_fewer)


def take_last(agent: Agent) -> None:
    rows = agent.labelled
    agent.held_labelled = LabelledRows(rows.x[:-1], rows.y[:-1], rows.ids[:-1])


@pytest.fixture(scope="module")
def runs(images: tuple[Path, NDArray[np.uint8]], tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(images[0], tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def whole(runs: Runs) -> Iterator[Told]:
    """All rows in every batch; every file that was opened to write is in Watch.paths."""
    Watch.paths = []
    told = runs.run()
    written, Watch.paths = Watch.paths, None
    runs.written = written  # type: ignore[attr-defined]
    yield told


def test_nothing_but_the_weights_tells_which_rows_were_drawn(runs: Runs, whole: Told) -> None:
    assert whole.differences(runs.run(drawn=False)) == []


def test_with_private_counts_nothing_but_the_weights_tells_of_one_row_less(
    runs: Runs, whole: Told, configured: Callable[..., config.Config]
) -> None:
    assert whole.differences(runs.run(fewer=True)) == []
    # The control: with public counts the plan, and with it each ledger, states the number.
    promises = [
        prepare(configured(f"privacy.record_counts={counts}")).account_plans["s0"].n_public
        for counts in ("private", "public")
    ]
    assert promises == [None, 12]


@pytest.mark.parametrize("left", [slice(1, None), slice(0, 0)], ids=["one less", "none"])
def test_with_private_counts_a_split_with_other_rows_than_declared_is_a_run_like_any_other(
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
    # The control: public counts are counted.
    with pytest.raises(DataError, match="labelled rows"):
        prepare(configured(given))


def test_a_batch_size_in_the_log_would_be_noticed(runs: Runs, whole: Told) -> None:
    def plant(patch: pytest.MonkeyPatch) -> None:
        import logging

        real = privacy_plan.PrivatePlan.draw_batch

        def tell(self: Any, rows: int) -> Tensor:
            mask = real(self, rows)
            logging.getLogger("privssl").info("batch of %d", int(mask.sum()))
            return mask

        patch.setattr(privacy_plan.PrivatePlan, "draw_batch", tell)

    assert whole.differences(runs.run(drawn=False, plant=plant)) == ["train.log"]


def traces(labels: list[Tensor]) -> list[bytes]:
    """Pixels, class names and labels in the forms in which a file could hold them."""
    found = [MARK, ", ".join(map(str, MARK)).encode(), NAME.encode()]
    for y in labels:
        assert len(set(y.tolist())) > 1  # a run of equal numbers may well be in a file
        found += [y.numpy().astype(kind).tobytes() for kind in ("u1", "<i4", "<i8", "<f4")]
        found += [str(y.tolist())[1:-1].encode(), "".join(map(str, y.tolist())).encode()]
    return found


def test_no_file_name_message_or_screen_holds_a_pixel_a_label_or_a_class_name(
    runs: Runs, whole: Told
) -> None:
    sought, folder = traces(runs.labels[:2]), runs.folder / "1/run"
    written = [path for path in folder.rglob("*") if path.is_file()]
    assert len(written) > 12
    for path in written:
        told = str(path).encode() + path.read_bytes()
        if path.name in NAMES_CLASSES:
            told = told.replace(NAME.encode(), b"")
        assert [trace for trace in sought if trace in told] == [], path
    sent = [part for key, down, up, _ in whole.traffic for part in (key.encode(), down, up)]
    told = b"".join([*sent, whole.screen.replace(NAME, "").encode()])  # --json: results.json
    assert [trace for trace in sought if trace in told] == []
    # The control: what is sought would be found in the labels themselves, and in a data file.
    assert all(trace in b"".join(traces(runs.labels[:2])) for trace in sought)
    split = (folder / "split.json").read_bytes()
    assert b'"s0"' in split  # the file was read, and it holds row numbers, not labels


def test_pictures_show_held_out_rows_alone(
    runs: Runs, whole: Told, images: tuple[Path, NDArray[np.uint8]]
) -> None:
    held_out = {row.tobytes() for row in images[1]}

    def are_held_out(x: Tensor) -> bool:
        pixels = ((x + 1) * 127.5).round().byte().numpy()
        return {row.tobytes() for row in pixels[:, 0]} <= held_out

    assert runs.shown and all(map(are_held_out, runs.shown))
    moved = runs.shown[0].clone()
    moved[0] = 0.0
    assert not are_held_out(moved)


def test_a_private_run_writes_nothing_outside_its_folder(runs: Runs, whole: Told) -> None:
    folder = runs.folder / "1/run"
    written: list[str] = runs.written  # type: ignore[attr-defined]
    inside = [(runs.folder / "1" / path).is_relative_to(folder) for path in written]
    # Python's own cache of modules that were imported for the first time, and the void.
    others = [p for p, ours in zip(written, inside, strict=True) if not ours]
    config_of_this_test = [str(runs.folder / "1/tiny.yaml")]
    others = [p for p in others if "__pycache__" not in p and p != os.devnull]
    assert others == config_of_this_test
    assert sum(inside) > 12  # the control: the watch sees the run's own files


def test_the_text_of_a_crash_in_a_private_visit_holds_no_row(
    configured: Callable[..., config.Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = prepare(configured())

    def crash(cfg: object, functions: object, batch: losses.Mixing, *_: object) -> Tensor:
        return torch.cat([batch.mild, batch.p1])  # cannot be

    monkeypatch.setattr(losses, "mixing_losses", crash)
    with accounts(prepared, tmp_path) as agents, pytest.raises(RuntimeError) as crashed:
        pixels = agents["s0"].labelled.x[:, 0, 0, :4]
        visit(prepared, agents["s0"], context("s0"))
    text = "".join(traceback.format_exception(crashed.value))
    assert "cat" in text
    for row in pixels.tolist():
        assert ", ".join(map(str, row)) not in text


def test_every_algorithm_that_can_be_private_is_under_these_tests() -> None:
    # Another one needs the tests above for its own private pass. FedAvg has them in
    # test_private_fedavg; a census in test_census_plan, test_census_attack, test_label_census.
    private = {name: kind.mechanism for name, kind in ALGORITHMS.items() if kind.can_be_private}
    assert private == {"fedssl": "dp-sgd", "fedavg": "dp-sgd", "label_census": "census"}
