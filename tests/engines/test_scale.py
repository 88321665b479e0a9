"""Many agents: the cost of a round, the memory limit, and unchanged results."""

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
from privssl.data.partition import _fill_empty_agents
from privssl.engines.local import LocalEngine
from privssl.errors import RunFolderError
from privssl.runs import checkpoint
from privssl.storage import spill_store, tensor_files
from privssl.storage.spill_store import SpillStore
from privssl.storage.tensor_files import LazyTensors, TensorSlice
from tests.support.command_line import PLAIN, assert_refused, command
from tests.support.toy_worlds import at_server, make, same_bits, simulate
from tests.support.transports import process_at_work


def bytes_in_ram(store: SpillStore) -> int:
    """Bytes of stored tensors in RAM."""
    store._release()
    return store._in_ram


def bytes_on_disk(store: SpillStore) -> int:
    """Size of its file in bytes, free slots included."""
    return store._end


def make_tensors(count: int, first: float = 0.0) -> dict[str, Tensor]:
    """One tensor of ``count`` numbers of 8 bytes."""
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
    """The tensors as a safetensors file: names, dtypes, shapes and bits."""
    own = {
        name: tensor.clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    return safetensors.torch.save(own)


# Tensors in a file --------------------------------------------------------------------------


@pytest.mark.parametrize("tensors", [{}, ODD, {f"{n}": torch.ones(n) for n in range(12)}])
def test_a_file_written_tensor_by_tensor_equals_that_of_safetensors(
    tmp_path: Path, tensors: dict[str, Tensor]
) -> None:
    size, _ = tensor_files.write_new_tensors(tmp_path / "t", tensors)
    assert (tmp_path / "t").read_bytes() == bits(tensors)
    assert size == len(bits(tensors))
    back = tensor_files.open_lazily(tmp_path / "t")
    assert bits(back) == bits(tensors)
    tensor_files.write_new_tensors(tmp_path / "again", back.lazy_tensors())
    assert (tmp_path / "again").read_bytes() == bits(tensors)


def test_lazy_tensors_are_read_on_access_as_independent_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor_files.write_new_tensors(tmp_path / "t", {"a": torch.ones(3), "b": torch.zeros(2)})
    sizes_read: list[int] = []
    part_of = tensor_files.part_of

    def counted(path: Path, at: int, size: int) -> bytearray:
        sizes_read.append(size)
        return part_of(path, at, size)

    monkeypatch.setattr(tensor_files, "part_of", counted)
    store = tensor_files.open_lazily(tmp_path / "t")
    sizes_read.clear()
    assert set(store) == {"a", "b"} and "a" in store and "c" not in store and len(store) == 2
    assert sizes_read == []
    store["a"].zero_()
    assert store["a"].tolist() == [1, 1, 1]
    assert sizes_read == [12, 12]


class CountingReader:
    """A reader of zeros that counts how many of its results are still in memory."""

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
def test_saving_a_checkpoint_holds_at_most_two_lazy_tensors_in_memory(
    tmp_path: Path, held: bool
) -> None:
    read = CountingReader()
    places = {"w": TensorSlice(torch.float32, (100,), 0)}
    memories: dict[str, Any] = {f"q{n}": LazyTensors(read, places) for n in range(50)}
    if held:  # the control: tensors in memory are counted
        memories = {agent: dict(memory) for agent, memory in memories.items()}
    checkpoint.save_snapshot(tmp_path, checkpoint.Snapshot(1, {}, memories, "d"))
    assert read.most == 50 if held else read.most <= 2
    back = checkpoint.load_snapshot(tmp_path, "d").memories
    assert bits(back["q49"]) == bits({"w": torch.zeros(100)})


def test_a_loaded_snapshot_reads_the_tensors_of_agents_lazily(tmp_path: Path) -> None:
    state: Any = {
        "F": make_tensors(2),
        "held": {"q0": make_tensors(3), "q1": {}},
        "t": torch.ones(1),
    }
    memories = {"q0": make_tensors(4), "q1": {}}
    checkpoint.save_snapshot(tmp_path, checkpoint.Snapshot(1, state, memories, "d"))
    back: Any = checkpoint.load_snapshot(tmp_path, "d")
    assert isinstance(back.memories["q0"], LazyTensors) and isinstance(
        back.state["held"]["q0"], LazyTensors
    )
    assert isinstance(back.state["F"], dict) and isinstance(back.state["t"], Tensor)
    assert bits(back.state["held"]["q0"]) == bits(make_tensors(3))
    assert bits(back.memories["q0"]) == bits(make_tensors(4))
    assert back.memories["q1"] == {}


@pytest.mark.slow
def test_the_memory_of_an_agent_is_one_entry_of_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Limits that allow 60 agents in the file, but not 6,000 tensors in the JSON.
    monkeypatch.setattr(tensor_files, "MAX_HEADER_BYTES", 60 * 80)
    monkeypatch.setattr(checkpoint, "MAX_JSON_BYTES", 60 * 300)
    many = {f"w{n}": torch.full((2, 3), float(n)) for n in range(96)}
    memories = {f"q{n}": {**many, **ODD, "own": torch.tensor(n)} for n in range(50)}
    memories["other"] = make_tensors(3)  # of another shape
    checkpoint.save_snapshot(tmp_path, checkpoint.Snapshot(1, {"held": memories}, memories, "d"))
    back: Any = checkpoint.load_snapshot(tmp_path, "d")
    for agent, memory in memories.items():
        assert bits(back.memories[agent]) == bits(memory) == bits(back.state["held"][agent])
    # Lazy memories can be saved again. The control: tensors of the server are listed one by one.
    checkpoint.save_snapshot(tmp_path, checkpoint.Snapshot(2, {}, back.memories, "d"))
    assert bits(checkpoint.load_snapshot(tmp_path, "d").memories["q49"]) == bits(memories["q49"])
    with pytest.raises(RunFolderError, match="cannot list 105 entries"):
        checkpoint.save_snapshot(tmp_path, checkpoint.Snapshot(3, {"F": memories["q0"]}, {}, "d"))


def test_a_checkpoint_with_too_many_entries_is_refused_and_the_older_one_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, many = ({f"q{n}": make_tensors(1) for n in range(count)} for count in (1, 40))
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


def test_tensors_that_fit_stay_in_ram_and_no_file_is_created(tmp_path: Path) -> None:
    store, given = SpillStore(tmp_path, 100), make_tensors(12)  # 96 bytes
    kept = store.put(given)
    assert kept["w"] is given["w"] and store.put(kept) is kept
    assert (bytes_in_ram(store), bytes_on_disk(store)) == (96, 0)


def test_tensors_that_do_not_fit_are_stored_on_disk_bit_for_bit(tmp_path: Path) -> None:
    store = SpillStore(tmp_path, 0)
    kept = store.put(ODD)
    assert bits(kept) == bits(ODD) and list(kept) == list(ODD)
    assert store.put(kept) is kept
    assert (bytes_in_ram(store), bytes_on_disk(store)) == (0, spill_store.PAGE)
    assert store.put({}) == {}
    store.close()
    store.close()


class OverlappingStore(SpillStore):
    """Violates the contract: all tensors get the same slot."""

    def _reserve_slot(self, size: int) -> int:
        super()._reserve_slot(size)
        return 0


class EarlyFreeingStore(SpillStore):
    """Violates the contract: slots are freed while they are in use."""

    def _acquire(self, tenant: Mapping[str, Tensor], at: int | None, size: int) -> None:
        super()._acquire(tenant, at, size)
        if at is not None:
            self._free.setdefault(size, []).append(at)


def put_and_compare(store: SpillStore, limit: int, moves: list[tuple[int, int]]) -> bool:
    """Put tensors of given sizes; whether all tensors that are still held are intact."""
    held: dict[int, Mapping[str, Tensor]] = {}
    expected: dict[int, Mapping[str, Tensor]] = {}
    for step, (place, count) in enumerate(moves):
        expected[place] = make_tensors(count, first=1000.0 * step)
        held[place] = store.put(expected[place])
        assert bytes_in_ram(store) <= limit
    whole = all(torch.equal(held[place]["w"], expected[place]["w"]) for place in held)
    store.close()
    return whole


@given(
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from([1, 3, 600, 1200])), max_size=30),
    st.sampled_from([0, 30, 10_000]),
)
@settings(max_examples=40, deadline=None)
def test_any_sequence_of_puts_keeps_all_tensors_intact_within_the_ram_limit(
    moves: list[tuple[int, int]], limit: int
) -> None:
    assert put_and_compare(SpillStore(None, limit), limit, moves)


@pytest.mark.parametrize("broken", [OverlappingStore, EarlyFreeingStore])
def test_control_the_spill_test_notices_a_slot_used_twice(broken: type[SpillStore]) -> None:
    assert not put_and_compare(broken(None, 0), 0, [(place, 3) for place in range(4)])


def test_a_free_slot_of_the_spill_file_is_reused(tmp_path: Path) -> None:
    store, all_of_them = SpillStore(tmp_path, 0), []
    kept = store.put(make_tensors(10))
    for number in range(20):
        kept = store.put(make_tensors(10, number))
    # The old tensor is freed after the new one is stored, so two slots alternate.
    assert bytes_on_disk(store) == 2 * spill_store.PAGE
    assert kept["w"][0] == 19
    for number in range(20):  # the control: slots in use are not reused
        all_of_them.append(store.put(make_tensors(10, number)))
    assert bytes_on_disk(store) >= 20 * spill_store.PAGE
    store.close()


def test_freed_ram_is_reused(tmp_path: Path) -> None:
    store = SpillStore(tmp_path, 100)
    first = store.put(make_tensors(12))
    assert isinstance(store.put(make_tensors(12)), LazyTensors)  # the control: the RAM was full
    del first
    assert not isinstance(store.put(make_tensors(12)), LazyTensors)
    store.close()


@dataclass(frozen=True)
class State:
    """The state of a server."""

    F: Mapping[str, Tensor]
    held: Mapping[str, Any]
    n: int


def test_agents_that_share_weights_share_a_slot(tmp_path: Path) -> None:
    shared = make_tensors(3)
    state = State(F=make_tensors(2), held={"q0": shared, "q1": shared, "note": 4}, n=3)
    store = SpillStore(tmp_path, 0)
    moved = store.put_parts(state)
    assert bytes_on_disk(store) == spill_store.PAGE
    assert moved.held["q0"] is moved.held["q1"] and bits(moved.held["q0"]) == bits(shared)
    assert moved.held["note"] == 4 and moved.F is state.F and moved.n == 3
    assert store.put_parts(moved).held["q0"] is moved.held["q0"]
    store.close()


def test_the_spill_file_has_no_name_and_disappears_after_a_kill(tmp_path: Path) -> None:
    pid = tmp_path / "pid"

    def keep_tensors(is_at_work: Callable[[], None]) -> None:
        pid.write_text(str(os.getpid()))
        store = SpillStore(tmp_path, 0)
        kept = store.put({"w": torch.ones(100_000)})
        assert kept and bytes_on_disk(store) >= 400_000
        is_at_work()
        time.sleep(60)

    with process_at_work(keep_tensors) as kill:
        files = [os.readlink(link) for link in Path(f"/proc/{pid.read_text()}/fd").iterdir()]
        deleted = [file for file in files if file.startswith(str(tmp_path))]
        assert deleted  # the control: the file exists
        assert list(tmp_path.iterdir()) == [pid]
        kill()
    assert list(tmp_path.iterdir()) == [pid]


# Agents with memories in a spill store ----------------------------------------------------------


ROWS = UnlabelledRows(torch.zeros(2, 1, 2, 2, dtype=torch.uint8), torch.arange(2))


def count(agent: Agent, message: Ack, ctx: Context) -> Ack:
    agent.memory = {"n": agent.memory.get("n", torch.zeros(())) + 1}
    return message


@pytest.mark.parametrize(("kind", "whole"), [(SpillStore, True), (EarlyFreeingStore, False)])
def test_an_interrupted_round_does_not_change_saved_memories(
    kind: type[SpillStore], whole: bool
) -> None:
    agents = [Agent(id=f"q{n}", held_unlabelled=ROWS) for n in range(3)]
    spilling = kind(None, 0)
    store = LocalEngine(agents, seed=0, device=torch.device("cpu"), spill_store=spilling)
    for number in (1, 2):
        list(store.deliver([Call(agent, count, Ack(), number) for agent in store.roster()]))
    before = store.memories()
    # Round 3 fails after two of three agents; the memories of round 2 must be unchanged.
    list(store.deliver([Call(agent, count, Ack(), 3) for agent in store.roster()[:2]]))
    assert ([float(before[f"q{n}"]["n"]) for n in range(3)] == [2, 2, 2]) is whole
    store.restore(before)
    list(store.deliver([Call(agent, count, Ack(), 3) for agent in store.roster()]))
    after = [float(memory["n"]) for memory in store.memories().values()]
    assert (after == [3, 3, 3]) is whole
    spilling.close()


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("semifl", {"profile": "semifl-head", "threshold": 0.0}),
        ("fedseal", {}),
        ("fedmatch", {"helpers_every": 1, "keep_helpers": True}),
    ],
)
def test_agents_with_memories_on_disk_have_the_same_bits(
    name: str, options: dict[str, Any]
) -> None:
    spilling = SpillStore(None, 0)

    class OnDisk(LocalEngine):
        def __init__(self, *agents: Any, **how: Any) -> None:
            super().__init__(*agents, spill_store=spilling, **how)

    parties = at_server(query=3)
    known: dict[str, Any] = {}
    if name == "fedseal":
        known = {"validation_rows": 4, "bootstrap_epochs": 1}
    one = simulate(make(name, **known, **options), parties)
    plain = {agent: dict(memory) for agent, memory in one.engine.memories().items()}
    other = simulate(make(name, **known, **options), parties, engine=OnDisk)
    memories = other.engine.memories()
    assert any(memories.values())
    assert all(isinstance(memory, LazyTensors) for memory in memories.values() if memory)
    assert same_bits(one.state, other.state) and same_bits(plain, memories)
    spilling.close()


def files_of(run: Path) -> dict[str, bytes]:
    """The files of a run that must be equal bit for bit."""
    last = sorted((run / "checkpoints").glob("round_*"))[-1]
    wanted = [run / "metrics.csv", run / "classifier.safetensors", *last.glob("*.safetensors")]
    return {path.name: path.read_bytes() for path in wanted}


@pytest.mark.slow
def test_a_run_with_memories_on_disk_has_the_same_bits_also_with_workers(tmp_path: Path) -> None:
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
    assert len(seen[0]["memories.safetensors"]) > 1000  # memories are not empty
    assert seen[0] == seen[1] == seen[2]


def test_a_full_spill_disk_ends_the_run_with_an_error_and_it_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "toy.yaml"
    config.write_text(PLAIN)
    chosen = ["run.workers=1", "run.memories_mb=0", "run.checkpoint_every=1"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    written, allowed_writes, pwrite = [0], [float("inf")], os.pwrite

    def nearly_full(file: int, data: Any, at: int) -> int:
        written[0] += 1
        if written[0] > allowed_writes[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(file, data, at)

    with monkeypatch.context() as full:
        full.setattr(os, "pwrite", nearly_full)
        assert command(config, *chosen, f"run.output={whole}", "--quiet").status == 0
        allowed_writes[0], written[0] = (
            written[0] - 1,
            0,
        )  # fail at the last write of the last round
        ended = command(config, *chosen, f"run.output={cut}", "--quiet")
    assert_refused(ended, "remember takes more than run.memories_mb", str(cut), "No space left",
                   "continue with --resume")  # fmt: skip
    assert (cut / "checkpoints" / "latest").read_text() == "round_00002\n"
    assert not (cut / "results.json").exists()
    assert command(config, *chosen, "--resume", cut, "--quiet").status == 0
    assert files_of(cut) == files_of(whole)


# The work of a round --------------------------------------------------------------------------


def rows(agents: int) -> Dataset:
    """Ten rows for each agent, and twenty with labels."""
    y = np.arange(10 * agents + 20) % 10
    x = np.repeat((25 * y).astype(np.uint8), 64).reshape(-1, 1, 8, 8)
    return from_arrays("toy", Arrays(x, y, x[:10], y[:10], tuple("0123456789")))


def calls_of_a_round(name: str, agents: int, **options: Any) -> int:
    """The number of calls of Python and C functions in a round with two agents."""
    parties = at_server(query=agents, dataset=rows(agents), unlabelled=10 * agents)
    played = simulate(make(name, query_per_round=2, **options), parties, 1)
    store, seen = SpillStore(), [0]

    def count_call(frame: Any, event: str, argument: Any) -> None:
        seen[0] += event in ("call", "c_call")

    gc.disable()  # its callbacks would be counted
    sys.setprofile(count_call)
    try:
        played.federation.begin(Round(2, "train", 2))
        store.put_parts(played.algorithm.round(played.state, played.federation))
        played.engine.memories()
    finally:
        sys.setprofile(None)
        gc.enable()
    return seen[0]


@pytest.mark.slow
def test_the_work_of_a_round_does_not_grow_with_agents_that_are_not_sampled() -> None:
    few, many = (calls_of_a_round("fedmatch", agents) for agents in (5, 500))
    assert many < 1.05 * few  # else one more call for each agent: 495 of a few thousand
    known: dict[str, Any] = {"validation_rows": 4, "bootstrap_epochs": 0}
    few, many = (calls_of_a_round("fedseal", n, history="sampled", **known) for n in (5, 500))
    assert many < 1.05 * few
    # The control: under the paper's rule all agents predict in every round.
    assert calls_of_a_round("fedseal", 500, history="all", **known) > 10 * many


def test_the_fast_reassignment_of_rows_equals_the_plain_loop() -> None:
    def plain_loop(hands: list[Any], rng: np.random.Generator) -> list[Any]:
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
        one = _fill_empty_agents(list(hands), np.random.default_rng(seed))
        other = plain_loop(list(hands), np.random.default_rng(seed))
        assert [a.tolist() for a in one] == [b.tolist() for b in other]


# The benchmark --------------------------------------------------------------------------------

SEMIFL = str(Path(__file__).parents[2] / "configs" / "semifl.yaml")
PEAK = """
from benchmarks.scale import peak_megabytes
before = peak_megabytes()
held = b"x" * (100 * 2**20)
print(peak_megabytes() - before)
"""


def test_peak_megabytes_measures_the_peak_of_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    assert 95 < float(done.stdout) < 110


@pytest.mark.slow
def test_the_benchmark_prints_a_line_for_each_number_of_agents(
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
