"""Many agents: a round costs what its agents cost, memory has a limit, and no bit moves."""

import errno
import gc
import os
import subprocess
import sys
import time
import weakref
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from torch import Tensor

from benchmarks import scale
from privssl.core.agents import Agent, UnlabelledRows
from privssl.core.engine import Call
from privssl.core.federation import Round
from privssl.core.messages import Ack
from privssl.core.task import Context
from privssl.data.datasets import Dataset, from_arrays
from privssl.data.npz import Arrays
from privssl.data.partition import _nobody_empty
from privssl.engines.local import LocalEngine
from privssl.errors import RunFolderError
from privssl.runs import checkpoint
from privssl.storage import spill_store, tensor_files
from privssl.storage.spill_store import SpillStore
from privssl.storage.tensor_files import LazyTensors, TensorSlice
from tests.support.command_line import PLAIN, assert_refused, command
from tests.support.toy_worlds import at_server, make, same_bits, simulate
from tests.support.transports import process_at_work


def in_ram(store: SpillStore) -> int:
    """Bytes of stored tensors in RAM."""
    store._release()
    return store._in_ram


def on_disk(store: SpillStore) -> int:
    """Bytes of its file, free slots included."""
    return store._end


def numbers(count: int, first: float = 0.0) -> dict[str, Tensor]:
    """One tensor of 8 bytes a number."""
    return {"w": torch.arange(count, dtype=torch.float64) + first}


ODD = {
    "a/b": torch.tensor(3.5),
    "none": torch.zeros(0, 2),
    'é"\n': torch.arange(6).reshape(2, 3).T,
    "bits": torch.tensor([True, False, True]),
    "half": torch.tensor([0.1, float("inf"), -0.0], dtype=torch.bfloat16),
    "short": torch.tensor([-1], dtype=torch.int16),
    "wide": torch.tensor([1e-300, float("nan")], dtype=torch.float64),
    "bytes": torch.tensor([[0, 255]], dtype=torch.uint8),
}


def bits(tensors: Mapping[str, Tensor]) -> bytes:
    """What safetensors makes of them: names, types, shapes and every bit."""
    own = {
        name: tensor.clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    return safetensors.torch.save(own)


# Tensors in a file --------------------------------------------------------------------------


@pytest.mark.parametrize("tensors", [{}, ODD, {f"{n}": torch.ones(n) for n in range(12)}])
def test_a_file_written_one_tensor_at_a_time_is_the_one_of_safetensors(
    tmp_path: Path, tensors: dict[str, Tensor]
) -> None:
    size, _ = tensor_files.write_new_tensors(tmp_path / "t", tensors)
    assert (tmp_path / "t").read_bytes() == bits(tensors)
    assert size == len(bits(tensors))
    back = tensor_files.open_lazily(tmp_path / "t")
    assert bits(back) == bits(tensors)
    tensor_files.write_new_tensors(tmp_path / "again", back.lazy_tensors())
    assert (tmp_path / "again").read_bytes() == bits(tensors)


def test_a_tensor_in_a_file_is_read_when_it_is_asked_for_and_is_not_to_be_written_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor_files.write_new_tensors(tmp_path / "t", {"a": torch.ones(3), "b": torch.zeros(2)})
    asked: list[int] = []
    part_of = tensor_files.part_of

    def counted(path: Path, at: int, size: int) -> bytearray:
        asked.append(size)
        return part_of(path, at, size)

    monkeypatch.setattr(tensor_files, "part_of", counted)
    there = tensor_files.open_lazily(tmp_path / "t")
    asked.clear()
    assert set(there) == {"a", "b"} and "a" in there and "c" not in there and len(there) == 2
    assert asked == []
    there["a"].zero_()
    assert there["a"].tolist() == [1, 1, 1]
    assert asked == [12, 12]


class Counted:
    """Reads zeros, and knows how many of the pieces that it read are still held."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def __call__(self, at: int, size: int) -> bytearray:
        class Piece(bytearray):
            pass

        piece = Piece(size)
        weakref.finalize(piece, self.gone)
        self.now += 1
        self.most = max(self.most, self.now)
        return piece

    def gone(self) -> None:
        self.now -= 1


@pytest.mark.parametrize("held", [False, True])
def test_a_checkpoint_holds_one_tensor_of_what_is_on_a_disk(tmp_path: Path, held: bool) -> None:
    read = Counted()
    places = {"w": TensorSlice(torch.float32, (100,), 0)}
    memories: dict[str, Any] = {f"q{n}": LazyTensors(read, places) for n in range(50)}
    if held:  # the control: what had to be held to be written would be seen
        memories = {agent: dict(memory) for agent, memory in memories.items()}
    checkpoint.save_snapshot(tmp_path, checkpoint.Snapshot(1, {}, memories, "d"))
    assert read.most == 50 if held else read.most <= 2
    back = checkpoint.load_snapshot(tmp_path, "d").memories
    assert bits(back["q49"]) == bits({"w": torch.zeros(100)})


def test_a_loaded_snapshot_holds_nothing_of_single_agents(tmp_path: Path) -> None:
    state: Any = {"F": numbers(2), "held": {"q0": numbers(3), "q1": {}}, "t": torch.ones(1)}
    memories = {"q0": numbers(4), "q1": {}}
    checkpoint.save_snapshot(tmp_path, checkpoint.Snapshot(1, state, memories, "d"))
    back: Any = checkpoint.load_snapshot(tmp_path, "d")
    assert isinstance(back.memories["q0"], LazyTensors) and isinstance(
        back.state["held"]["q0"], LazyTensors
    )
    assert isinstance(back.state["F"], dict) and isinstance(back.state["t"], Tensor)
    assert bits(back.state["held"]["q0"]) == bits(numbers(3))
    assert bits(back.memories["q0"]) == bits(numbers(4))
    assert back.memories["q1"] == {}


def test_what_an_agent_remembers_is_one_entry_of_a_file_however_many_tensors_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A file that may list no more than 60 agents, and JSON that could not list 6,000 tensors.
    monkeypatch.setattr(tensor_files, "MAX_HEADER_BYTES", 60 * 80)
    monkeypatch.setattr(checkpoint, "MAX_JSON_BYTES", 60 * 300)
    many = {f"w{n}": torch.full((2, 3), float(n)) for n in range(96)}
    memories = {f"q{n}": {**many, **ODD, "own": torch.tensor(n)} for n in range(50)}
    memories["other"] = numbers(3)  # of another form
    checkpoint.save_snapshot(tmp_path, checkpoint.Snapshot(1, {"held": memories}, memories, "d"))
    back: Any = checkpoint.load_snapshot(tmp_path, "d")
    for agent, memory in memories.items():
        assert bits(back.memories[agent]) == bits(memory) == bits(back.state["held"][agent])
    # What was read can be written again, and the control: tensors of the server are each listed.
    checkpoint.save_snapshot(tmp_path, checkpoint.Snapshot(2, {}, back.memories, "d"))
    assert bits(checkpoint.load_snapshot(tmp_path, "d").memories["q49"]) == bits(memories["q49"])
    with pytest.raises(RunFolderError, match="cannot list 105 entries"):
        checkpoint.save_snapshot(tmp_path, checkpoint.Snapshot(3, {"F": memories["q0"]}, {}, "d"))


def test_a_checkpoint_that_could_not_be_read_again_is_refused_and_the_older_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, many = ({f"q{n}": numbers(1) for n in range(count)} for count in (1, 40))
    checkpoint.save_snapshot(tmp_path, checkpoint.Snapshot(1, {}, few, "d"))
    for module, name in ((checkpoint, "MAX_JSON_BYTES"), (tensor_files, "MAX_HEADER_BYTES")):
        with monkeypatch.context() as smaller:
            smaller.setattr(module, name, 1000)
            with pytest.raises(RunFolderError, match="cannot list 40 entries"):
                checkpoint.save_snapshot(tmp_path, checkpoint.Snapshot(2, {}, many, "d"))
        assert sorted(os.listdir(tmp_path)) == ["latest", "round_00001"]
        assert checkpoint.load_snapshot(tmp_path, "d").round == 1
    checkpoint.save_snapshot(tmp_path, checkpoint.Snapshot(2, {}, many, "d"))  # the control


# The spill store -----------------------------------------------------------------------------


def test_what_fits_stays_as_it_is_and_no_file_is_made(tmp_path: Path) -> None:
    there, given = SpillStore(tmp_path, 100), numbers(12)  # 96 bytes
    kept = there.put(given)
    assert kept["w"] is given["w"] and there.put(kept) is kept
    assert (in_ram(there), on_disk(there)) == (96, 0)


def test_what_does_not_fit_comes_back_to_the_last_bit_and_takes_no_ram(tmp_path: Path) -> None:
    there = SpillStore(tmp_path, 0)
    kept = there.put(ODD)
    assert bits(kept) == bits(ODD) and list(kept) == list(ODD)
    assert there.put(kept) is kept
    assert (in_ram(there), on_disk(there)) == (0, spill_store.PAGE)
    assert there.put({}) == {}
    there.close()
    there.close()


class Forgetful(SpillStore):
    """Gives every room to everybody."""

    def _room(self, size: int) -> int:
        super()._room(size)
        return 0


class Hasty(SpillStore):
    """Frees a room at once, though somebody lives in it."""

    def _acquire(self, tenant: Mapping[str, Tensor], at: int | None, size: int) -> None:
        super()._acquire(tenant, at, size)
        if at is not None:
            self._free.setdefault(size, []).append(at)


def carry_out(there: SpillStore, limit: int, moves: list[tuple[int, int]]) -> bool:
    """Put things of so many numbers in places; whether each is as it was put, to the end."""
    held: dict[int, Mapping[str, Tensor]] = {}
    expected: dict[int, Mapping[str, Tensor]] = {}
    for step, (place, count) in enumerate(moves):
        expected[place] = numbers(count, first=1000.0 * step)
        held[place] = there.put(expected[place])
        assert in_ram(there) <= limit
    whole = all(torch.equal(held[place]["w"], expected[place]["w"]) for place in held)
    there.close()
    return whole


@given(
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from([1, 3, 600, 1200])), max_size=30),
    st.sampled_from([0, 30, 10_000]),
)
@settings(max_examples=40, deadline=None)
def test_whatever_comes_and_goes_all_stays_whole_and_ram_has_its_limit(
    moves: list[tuple[int, int]], limit: int
) -> None:
    assert carry_out(SpillStore(None, limit), limit, moves)


@pytest.mark.parametrize("broken", [Forgetful, Hasty])
def test_that_property_notices_a_room_that_is_given_to_two(broken: type[SpillStore]) -> None:
    assert not carry_out(broken(None, 0), 0, [(place, 3) for place in range(4)])


def test_a_room_that_nobody_needs_is_used_again(tmp_path: Path) -> None:
    there, all_of_them = SpillStore(tmp_path, 0), []
    kept = there.put(numbers(10))
    for number in range(20):
        kept = there.put(numbers(10, number))
    # The old one is let go of when the new one is there, so two rooms take turns.
    assert on_disk(there) == 2 * spill_store.PAGE
    assert kept["w"][0] == 19
    for number in range(20):  # the control: rooms that are lived in are not used again
        all_of_them.append(there.put(numbers(10, number)))
    assert on_disk(there) >= 20 * spill_store.PAGE
    there.close()


def test_ram_that_is_free_again_is_used_again(tmp_path: Path) -> None:
    there = SpillStore(tmp_path, 100)
    first = there.put(numbers(12))
    assert isinstance(there.put(numbers(12)), LazyTensors)  # the control: there was no room
    del first
    assert not isinstance(there.put(numbers(12)), LazyTensors)
    there.close()


@dataclass(frozen=True)
class Held:
    """A server's state."""

    F: Mapping[str, Tensor]
    held: Mapping[str, Any]
    n: int


def test_agents_that_share_weights_share_a_room(tmp_path: Path) -> None:
    shared = numbers(3)
    state = Held(F=numbers(2), held={"q0": shared, "q1": shared, "note": 4}, n=3)
    there = SpillStore(tmp_path, 0)
    moved = there.put_parts(state)
    assert on_disk(there) == spill_store.PAGE
    assert moved.held["q0"] is moved.held["q1"] and bits(moved.held["q0"]) == bits(shared)
    assert moved.held["note"] == 4 and moved.F is state.F and moved.n == 3
    assert there.put_parts(moved).held["q0"] is moved.held["q0"]
    there.close()


def test_the_file_has_no_name_and_is_gone_after_kill_9(tmp_path: Path) -> None:
    pid = tmp_path / "pid"

    def holds(is_at_work: Callable[[], None]) -> None:
        pid.write_text(str(os.getpid()))
        there = SpillStore(tmp_path, 0)
        kept = there.put({"w": torch.ones(100_000)})
        assert kept and on_disk(there) >= 400_000
        is_at_work()
        time.sleep(60)

    with process_at_work(holds) as kill:
        files = [os.readlink(link) for link in Path(f"/proc/{pid.read_text()}/fd").iterdir()]
        deleted = [file for file in files if file.startswith(str(tmp_path))]
        assert deleted  # the control: it is there
        assert list(tmp_path.iterdir()) == [pid]
        kill()
    assert list(tmp_path.iterdir()) == [pid]


# Agents with memories in a spill store ----------------------------------------------------------


ROWS = UnlabelledRows(torch.zeros(2, 1, 2, 2, dtype=torch.uint8), torch.arange(2))


def count(agent: Agent, message: Ack, ctx: Context) -> Ack:
    agent.memory = {"n": agent.memory.get("n", torch.zeros(())) + 1}
    return message


@pytest.mark.parametrize(("kind", "whole"), [(SpillStore, True), (Hasty, False)])
def test_a_round_that_is_interrupted_leaves_the_memories_of_the_round_before(
    kind: type[SpillStore], whole: bool
) -> None:
    agents = [Agent(id=f"q{n}", held_unlabelled=ROWS) for n in range(3)]
    lying = kind(None, 0)
    there = LocalEngine(agents, seed=0, device=torch.device("cpu"), spill_store=lying)
    for number in (1, 2):
        list(there.deliver([Call(agent, count, Ack(), number) for agent in there.roster()]))
    before = there.memories()
    # Round 3 breaks off after two of three agents; who is asked then must find what round 2 left.
    list(there.deliver([Call(agent, count, Ack(), 3) for agent in there.roster()[:2]]))
    assert ([float(before[f"q{n}"]["n"]) for n in range(3)] == [2, 2, 2]) is whole
    there.restore(before)
    list(there.deliver([Call(agent, count, Ack(), 3) for agent in there.roster()]))
    after = [float(memory["n"]) for memory in there.memories().values()]
    assert (after == [3, 3, 3]) is whole
    lying.close()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("semifl", {"profile": "semifl-head", "threshold": 0.0}),
        ("fedseal", {}),
        ("fedmatch", {"helpers_every": 1, "keep_helpers": True}),
    ],
)
def test_agents_that_remember_on_a_disk_do_the_same_to_the_last_bit(
    name: str, options: dict[str, Any]
) -> None:
    lying = SpillStore(None, 0)

    class OnDisk(LocalEngine):
        def __init__(self, *agents: Any, **how: Any) -> None:
            super().__init__(*agents, spill_store=lying, **how)

    parties = at_server(query=3)
    known: dict[str, Any] = {}
    if name == "fedseal":
        known = {"validation_rows": 4, "bootstrap_epochs": 1}
    one = simulate(make(name, **known, **options), parties)
    plain = {agent: dict(memory) for agent, memory in one.engine.memories().items()}
    other = simulate(make(name, **known, **options), parties, engine=OnDisk)
    remembered = other.engine.memories()
    assert any(remembered.values())
    assert all(isinstance(memory, LazyTensors) for memory in remembered.values() if memory)
    assert same_bits(one.state, other.state) and same_bits(plain, remembered)
    lying.close()


def files_of(run: Path) -> dict[str, bytes]:
    """What a run must have written to the last bit."""
    last = sorted((run / "checkpoints").glob("round_*"))[-1]
    wanted = [run / "metrics.csv", run / "classifier.safetensors", *last.glob("*.safetensors")]
    return {path.name: path.read_bytes() for path in wanted}


def test_a_run_is_the_same_with_its_memories_on_disk_also_with_workers(tmp_path: Path) -> None:
    config = tmp_path / "toy.yaml"
    config.write_text(PLAIN)
    seen = []
    for place, chosen in enumerate(
        (["run.workers=1"], ["run.workers=1", "run.memories_mb=0"],
         ["run.workers=2", "run.memories_mb=0"])
    ):  # fmt: skip
        out = tmp_path / f"{place}"
        assert command(config, *chosen, f"run.output={out}", "--quiet").status == 0
        seen.append(files_of(out))
    assert len(seen[0]["memories.safetensors"]) > 1000  # there is something to remember
    assert seen[0] == seen[1] == seen[2]


def test_a_full_disk_ends_the_run_in_words_and_it_goes_on_from_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "toy.yaml"
    config.write_text(PLAIN)
    chosen = ["run.workers=1", "run.memories_mb=0", "run.checkpoint_every=1"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    written, room, pwrite = [0], [float("inf")], os.pwrite

    def nearly_full(file: int, data: Any, at: int) -> int:
        written[0] += 1
        if written[0] > room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(file, data, at)

    with monkeypatch.context() as full:
        full.setattr(os, "pwrite", nearly_full)
        assert command(config, *chosen, f"run.output={whole}", "--quiet").status == 0
        room[0], written[0] = written[0] - 1, 0  # not the last of what the last round remembers
        ended = command(config, *chosen, f"run.output={cut}", "--quiet")
    assert_refused(ended, "remember takes more than run.memories_mb", str(cut), "No space left",
                   "continue with --resume")  # fmt: skip
    assert (cut / "checkpoints" / "latest").read_text() == "round_00002\n"
    assert not (cut / "results.json").exists()
    assert command(config, *chosen, "--resume", cut, "--quiet").status == 0
    assert files_of(cut) == files_of(whole)


# What a round does ----------------------------------------------------------------------------


def rows(agents: int) -> Dataset:
    """Ten rows for each agent, and twenty with labels."""
    y = np.arange(10 * agents + 20) % 10
    x = np.repeat((25 * y).astype(np.uint8), 64).reshape(-1, 1, 8, 8)
    return from_arrays("toy", Arrays(x, y, x[:10], y[:10], tuple("0123456789")))


def calls_of_a_round(name: str, agents: int, **options: Any) -> int:
    """Functions, of Python and of C, that a round with two agents calls, what is kept included."""
    parties = at_server(query=agents, dataset=rows(agents), unlabelled=10 * agents)
    played = simulate(make(name, query_per_round=2, **options), parties, 1)
    there, seen = SpillStore(), [0]

    def called(frame: Any, event: str, argument: Any) -> None:
        seen[0] += event in ("call", "c_call")

    gc.disable()  # whose callbacks would be counted
    sys.setprofile(called)
    try:
        played.federation.begin(Round(2, "train", 2))
        there.put_parts(played.algorithm.round(played.state, played.federation))
        played.engine.memories()
    finally:
        sys.setprofile(None)
        gc.enable()
    return seen[0]


def test_a_round_of_two_agents_does_the_same_among_five_and_among_five_hundred() -> None:
    few, many = (calls_of_a_round("fedmatch", agents) for agents in (5, 500))
    assert many < 1.05 * few  # else one more call for each agent: 495 of a few thousand
    known: dict[str, Any] = {"validation_rows": 4, "bootstrap_epochs": 0}
    few, many = (calls_of_a_round("fedseal", n, history="sampled", **known) for n in (5, 500))
    assert many < 1.05 * few
    # The control: by the paper's rule all agents predict in every round.
    assert calls_of_a_round("fedseal", 500, history="all", **known) > 10 * many


def test_who_gets_a_row_of_the_richest_is_as_in_the_plain_loop() -> None:
    def plainly(hands: list[Any], rng: np.random.Generator) -> list[Any]:
        for poor in [agent for agent, hand in enumerate(hands) if not len(hand)]:
            rich = max(range(len(hands)), key=lambda agent: len(hands[agent]))
            taken = rng.integers(len(hands[rich]))
            hands[poor] = hands[rich][[taken]]
            hands[rich] = np.delete(hands[rich], taken)
        return [np.sort(hand) for hand in hands]

    for seed in range(30):
        rng = np.random.default_rng(seed)
        sizes = rng.multinomial(40, rng.dirichlet(np.full(25, 0.1)))
        hands = np.split(rng.permutation(40), np.cumsum(sizes)[:-1])
        one = _nobody_empty(list(hands), np.random.default_rng(seed))
        other = plainly(list(hands), np.random.default_rng(seed))
        assert [a.tolist() for a in one] == [b.tolist() for b in other]


# The benchmark --------------------------------------------------------------------------------

SEMIFL = str(Path(__file__).parents[2] / "configs" / "semifl.yaml")
PEAK = """
from benchmarks.scale import peak_megabytes
before = peak_megabytes()
held = b"x" * (100 * 2**20)
print(peak_megabytes() - before)
"""


def test_the_peak_that_is_told_is_that_of_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    assert 95 < float(done.stdout) < 110


@pytest.mark.slow
def test_the_benchmark_tells_a_line_for_each_number_of_agents(
    capsys: pytest.CaptureFixture[str],
) -> None:
    small = ["--agents", "3", "--rows", "4", "--sampled", "2", "--rounds", "3"]
    assert scale.main([SEMIFL, "model.width=4", *small]) == 0
    *_, line = capsys.readouterr().out.splitlines()
    name, agents, *cells = (cell.strip() for cell in line.strip("|").split("|"))
    assert (name, agents, len(cells)) == ("semifl", "3", 8)
    assert all(float(cell) >= 0 for cell in cells)


@pytest.mark.slow
def test_ten_thousand_agents_stay_below_two_gigabytes() -> None:
    options = Namespace(rows=50, side=8, sampled=10, rounds=3, workers=1)
    for limit in (512, 0):
        found = scale.cell(options, SEMIFL, [f"run.memories_mb={limit}"], 10_000)
        assert found["peak"] < 2000
