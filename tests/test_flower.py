"""Over Flower itself: a SuperLink and five SuperNodes on loopback, once for all tests here.

What sites and their engine owe is tested without a network (test_engine_conformance.py,
test_sites_engine.py, test_run_over_sites.py); here, that Flower carries their letters, and that
all that Flower's processes can do to a run is to hold it up. SuperNodes know doors, not what is
behind: each test puts sites of its own there. All of it is slow, and needs privssl[flower].
"""

import contextlib
import dataclasses
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import posts
import pytest
import test_engine_conformance as conformance
from command_line import command
from test_engine_conformance import STEPS, Told, agents, ask
from test_resume import Place
from test_run_over_sites import DIGITS, on_digits
from test_site import serving

from accounting.ledger import read_journal
from privssl import run_engine
from privssl.engines.flower_post import FlowerPost
from privssl.engines.local import LocalEngine
from privssl.engines.sites import SitesEngine, Terms
from privssl.site import demo, opening, settings
from privssl.site.demo import superlink, write_sites
from privssl.site.joining import SuperNode

FLOWER = (Path(sys.executable).parent / "flwr").exists() or shutil.which("flwr")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FLOWER, reason="Flower is not installed: pip install '.[flower]'"),
]
NAMES = ("s0", "s1", "q0", "q1", "q2")
PATIENT = Terms(join_seconds=120.0, visit_seconds=120.0)


@dataclasses.dataclass
class Network:
    """A SuperLink, and a SuperNode for each door."""

    folder: Path
    address: str
    nodes: dict[str, SuperNode]

    def door(self, name: str) -> Path:
        return self.folder / name / "door"


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    folder = tmp_path_factory.mktemp("net")
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(superlink(folder / "link"))
        nodes = {}
        for name in NAMES:
            (folder / name).mkdir()
            node = SuperNode(folder / name / "door", folder / name / "flower", address, "", "")
            stack.callback(node.stop)
            node.start()
            nodes[name] = node
        yield Network(folder, address, nodes)


@pytest.fixture(scope="module")
def post(network: Network) -> Iterator[FlowerPost]:
    """One carrier for all tests: starting one takes ten seconds."""
    with contextlib.closing(FlowerPost(network.address, "")) as found:
        end = time.monotonic() + 90
        while len(found.addresses()) < len(NAMES) and time.monotonic() < end:
            time.sleep(1)
        yield found


class Lent:
    """A post that is not closed by whoever uses it."""

    def __init__(self, post: FlowerPost) -> None:
        self._post = post

    def addresses(self) -> Sequence[str]:
        return self._post.addresses()

    def exchange(self, letters: Mapping[str, bytes], seconds: float) -> Mapping[str, bytes]:
        return self._post.exchange(letters, seconds)

    def close(self) -> None:
        """Others need it."""


@pytest.fixture
def there(network: Network, post: FlowerPost, tmp_path: Path) -> Iterator[SitesEngine]:
    """An engine over three sites that do the steps of the conformance suite."""
    with contextlib.ExitStack() as stack:
        for agent, name in zip(agents(), NAMES, strict=False):
            desk = posts.desk(agent, STEPS, tmp_path)
            stack.enter_context(serving(network.door(name), desk.handle))
        yield SitesEngine(
            Lent(post), [agent.ref for agent in agents()], algorithm=STEPS,
            agreement=posts.AGREED, home=LocalEngine([], seed=3, device=posts.CPU), terms=PATIENT,
        )  # fmt: skip


# What every engine owes ------------------------------------------------------------------------


def test_replies_come_in_order_with_the_bits_of_one_process_and_a_replay_is_the_same(
    there: SitesEngine,
) -> None:
    with conformance.made("local") as reference:
        expected = ask(reference, STEPS.draw, Told(number=2.0), whom="q2 q0 q1")
    first = ask(there, STEPS.draw, Told(number=2.0), whom="q2 q0 q1")
    assert [reply.sender.id for reply in first] == ["q2", "q0", "q1"]
    assert conformance.all_same(first, expected)
    assert conformance.all_same(ask(there, STEPS.draw, Told(number=2.0), whom="q2 q0 q1"), first)


def test_memories_stay_at_sites_and_are_put_back(there: SitesEngine) -> None:
    ask(there, STEPS.count, whom="q0 q1")
    before = there.memories()
    assert [r.said.number for r in ask(there, STEPS.count, number=2)] == [2.0, 2.0, 1.0]
    there.restore(before)
    assert [r.said.number for r in ask(there, STEPS.count, number=2)] == [2.0, 2.0, 1.0]


def test_silence_and_errors_stay_in_their_place(there: SitesEngine) -> None:
    assert [reply.silent for reply in ask(there, STEPS.hush)] == [True, False, True]
    with pytest.raises(Exception, match=r"q0 has no reply to fail .*\(data\)"):
        ask(there, STEPS.fail)


def test_large_letters_are_carried_whole(there: SitesEngine) -> None:
    import torch

    wide = Told(w={"a": torch.arange(5_000_000.0)})  # 20 MB: Flower cuts it into pieces
    said = ask(there, STEPS.scribble, wide, whom="q1")[0].said
    assert said.w["a"].shape == (5_000_000,) and float(said.w["a"].min()) == 9.0


# The same bits ---------------------------------------------------------------------------------


@pytest.mark.parametrize("method", DIGITS)
def test_five_sites_over_flower_come_to_the_weights_of_one_process(
    network: Network, post: FlowerPost, tmp_path: Path, method: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    (tmp_path / "c.yaml").write_text(on_digits(method))
    names = write_sites(tmp_path / "sites", tmp_path / "c.yaml", [])
    assert tuple(names) == NAMES
    monkeypatch.setattr(run_engine, "FlowerPost", lambda *_: Lent(post))
    there = Place(tmp_path / "sites" / "experiment.yaml", tmp_path / "run")
    here = Place(there.config, tmp_path / "here")
    with contextlib.ExitStack() as stack:
        for name in names:
            site = settings.load(tmp_path / "sites" / name / "site.yaml")
            stack.enter_context(serving(network.door(name), opening.opened(site).handle))
        outcome = command(there.config, there.output, "run.engine=flower", "--quiet")
        assert outcome.status == 0, outcome.err
    assert command(here.config, here.output, "run.workers=1", "--quiet").status == 0
    mine, expected = there.weights(), here.weights()
    assert mine.keys() == expected.keys()
    assert all((w == expected[name]).all() for name, w in mine.items())


# Nothing leaves loopback -------------------------------------------------------------------------


def test_no_process_of_ours_has_a_connection_beyond_loopback(
    network: Network, there: SitesEngine
) -> None:
    ask(there, STEPS.draw)
    found = _connections(network.folder)
    assert found, "the control: there are connections"
    beyond = [line for line in found if not line[1].startswith(("127.", "::1"))]
    assert beyond == []


def _connections(folder: Path) -> list[tuple[int, str]]:
    """(process, remote address) of TCP connections of processes of Flower under a folder."""
    inodes = {}
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            cells = line.split()
            raw = bytes.fromhex(cells[2].partition(":")[0])
            words = b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4))
            address = socket.inet_ntop(family, words)
            if address not in ("0.0.0.0", "::"):
                inodes[cells[9]] = address.removeprefix("::ffff:")
    found = []
    for process in (name for name in os.listdir("/proc") if name.isdigit()):
        with contextlib.suppress(OSError):
            if bytes(folder) not in Path(f"/proc/{process}/environ").read_bytes():
                continue
            for file in os.listdir(f"/proc/{process}/fd"):
                target = os.readlink(f"/proc/{process}/fd/{file}")
                inode = target.removeprefix("socket:[").removesuffix("]")
                if inode in inodes:
                    found.append((int(process), inodes[inode]))
    return found


# Kills -------------------------------------------------------------------------------------------

PRIVATE = """
data: {name: toy, labelled: 24, unlabelled: 60}
agents: {support: 2, query: 3}
model: {name: small_cnn, width: 4}
algorithm:
  {name: fedssl, rounds: 7, local_steps: 1, batch_size: 8, generator_width: 4, gate: 0.0,
   warm_up: 0}
privacy: {epsilon: 9.0, delta: 1.0e-3, noise_multiplier: 2.0, sample_rate: 1.0, steps: 2}
run: {checkpoint_every: 1, images_every: 1000}
"""
HOW = ("run.absent=skip", "run.quorum=0.5", "run.visit_seconds=60.0", "--quiet")


class Deployment:
    """Coordinator, SuperLink and five sites with their SuperNodes, each a process to be killed."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        (folder / "c.yaml").write_text(PRIVATE)
        self.folder, self.stack = folder / "sites", stack
        self.names = write_sites(self.folder, folder / "c.yaml", [])
        self.address = self.link()
        self.sites: dict[str, Any] = {}
        for name in self.names:
            self.start(name)
        for name in self.names:
            demo.wait_for_site(self.folder / name)
        self.run = self.folder / "run"
        self.train = demo.train(self.folder, self.address, *HOW)

    def link(self, port: int = 0) -> str:
        return self.stack.enter_context(superlink(self.folder / "superlink", port))

    def start(self, name: str) -> None:
        opened = demo.site(self.folder / name, self.address)
        self.sites[name] = self.stack.enter_context(opened)

    def log(self, name: str) -> str:
        path = self.folder / name / "site.log"
        return path.read_text() if path.exists() else ""

    def charged(self, name: str) -> int:
        return len(read_journal(self.folder / name / "ledger" / f"{name}.jsonl").events)

    def rounds(self) -> int:
        path = self.run / "metrics.csv"
        return max(len(path.read_text().splitlines()) - 1, 0) if path.exists() else 0

    def until(self, true: Any, what: str) -> None:
        end = time.monotonic() + 240
        while not true():
            assert time.monotonic() < end, f"never came: {what}"
            assert self.train.poll() is None, f"the run ended before: {what}"
            time.sleep(0.02)


def ours(pattern: str, folder: Path) -> list[int]:
    """Processes of Flower with this in their command line, of the test that has this folder."""
    found = []
    for process in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        with contextlib.suppress(OSError):
            about = Path(f"/proc/{process}")
            settings_ = (about / "environ").read_bytes().split(b"\0")
            home = [part for part in settings_ if part.startswith(b"FLWR_HOME=" + bytes(folder))]
            words = (about / "cmdline").read_bytes().replace(b"\0", b" ")
            if home and pattern.encode() in words:
                found.append(process)
    return found


def kill(pattern: str, folder: Path) -> None:
    """SIGKILL to those."""
    for process in ours(pattern, folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def test_a_private_run_survives_kills_at_six_moments_and_no_ledger_is_below_what_was_released(
    tmp_path: Path,
) -> None:
    with contextlib.ExitStack() as stack:
        there = Deployment(tmp_path, stack)

        # 1: a site in the middle of a visit, as soon as the visit is charged.
        there.until(lambda: there.charged("s0") == 1, "the first charge")
        os.killpg(there.sites["s0"].pid, signal.SIGKILL)
        kill("flower-supernode", there.folder / "s0")  # its SuperNode is a group of its own
        there.start("s0")
        there.until(lambda: there.rounds() >= 1, "a round after the death of s0")

        # 2: a SuperNode.
        kill("flower-supernode", there.folder / "q1")
        there.until(lambda: there.rounds() >= 2, "a round after the death of a SuperNode")

        # 3: the carrier beside the coordinator.
        kill("flwr-serverapp", there.folder)
        there.until(lambda: there.rounds() >= 3, "a round after the death of the carrier")

        # 4: the process of Flower that brings a letter.
        there.until(lambda: ours("flwr-clientapp", there.folder), "a letter on its way")
        kill("flwr-clientapp", there.folder)
        there.until(lambda: there.rounds() >= 4, "a round after the death of a bringer")

        # 5: the SuperLink, which forgets its runs.
        port = int(there.address.rpartition(":")[2])
        kill("", there.folder / "superlink")
        time.sleep(1)
        there.link(port)
        there.until(lambda: there.rounds() >= 5, "a round after the death of the SuperLink")

        # 6: the coordinator, in the middle of a round.
        charged = there.charged("s0")
        there.until(lambda: there.charged("s0") > charged, "another visit")
        there.train.kill()
        there.train.wait()
        there.train = demo.train(
            there.folder, there.address, *HOW, "--resume", str(there.run), output=False
        )
        assert there.train.wait(timeout=400) == 0

        for name in ("s0", "s1"):
            worked = {line.split("Visit ")[1] for line in there.log(name).splitlines()
                      if line.endswith(" done")}  # fmt: skip
            # The control: kill 1 hit a visit that was charged, and of which nothing came.
            assert len(worked) <= there.charged(name) - (name == "s0")
            journal = read_journal(there.folder / name / "ledger" / f"{name}.jsonl")
            assert journal.problems == [] and journal.epsilon <= 9.0
    assert there.rounds() == 7
