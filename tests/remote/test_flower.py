"""Over Flower itself: one SuperLink and five SuperNodes on loopback, for all tests here.

What sites and their engine owe is tested without a network (test_engine_conformance.py,
test_remote_engine.py, test_run_over_sites.py); here, that Flower delivers their requests, and that
all that Flower's processes can do to a run is to hold it up. It needs privssl[flower].

A request costs Flower some seconds and a process of its own, whatever is in it. So SuperNodes are
started once and know sockets, not what is behind: each socket has a conformance site and one for
each of five methods, and the first byte of a request says which of them it is for. The runs of
the five methods go on side by side from the beginning, each with a relay of its own, while the
tests of the conformance suite use the same SuperNodes.
"""

import contextlib
import dataclasses
import faulthandler
import functools
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from accounting.ledger import read_journal
from privssl.algorithms.base import MissingReplyPolicy
from privssl.core.engine import Call
from privssl.core.messages import NoReply
from privssl.engines.local import LocalEngine
from privssl.engines.remote import SitesEngine
from privssl.remote import flower_transport
from privssl.remote.discovery import RemoteTimeouts, SiteError
from privssl.remote.flower_transport import FlowerTransport
from privssl.runs import engine_factory
from privssl.site import demo, settings, socket_server, startup
from privssl.site.demo import superlink, write_sites
from privssl.site.supernode import SuperNode
from tests.support import engine_conformance as conformance
from tests.support import transports
from tests.support.command_line import command
from tests.support.engine_conformance import STEPS, Told, ask
from tests.support.resume import Place
from tests.support.run_over_sites import DIGITS, on_digits

FLOWER = (Path(sys.executable).parent / "flwr").exists() or shutil.which("flwr")
pytestmark = [
    pytest.mark.flower,
    pytest.mark.skipif(not FLOWER, reason="Flower is not installed: pip install '.[flower]'"),
]
NAMES = ("s0", "s1", "q0", "q1", "q2")
#: Six runs begin at once, each with several processes of Flower: on a slow machine that takes
#: minutes, in which nothing is wrong.
LONG = 1200.0
PATIENT = RemoteTimeouts(join_seconds=LONG, visit_seconds=LONG, hello_seconds=LONG)
HUNG = 2 * LONG  # seconds after which a run says where it is, and ends
Handler = Callable[[bytes], bytes]
#: Stands before a command that gets a network of its own.
ALONE = ["unshare", "--map-root-user", "--net"]

#: First byte of a request: which of the sites behind a socket it is for.
CONFORMANCE = b"-"
MARKS = {method: str(number).encode() for number, method in enumerate(DIGITS)}


# The network -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Network:
    """A SuperLink, SuperNodes, and behind their sockets the sites of five runs, under way."""

    folder: Path
    address: str
    runs: Mapping[str, BaseProcess]  # by method
    seen: set[str]  # remote addresses of all connections until now


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    folder = tmp_path_factory.mktemp("net")
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(demo, "START_SECONDS", LONG)
        for limit in ("START_SECONDS", "GRACE_SECONDS"):
            patch.setattr(flower_transport, limit, LONG)
        address = stack.enter_context(superlink(folder / "link"))
        for name, sites in _sites(folder).items():
            (folder / name).mkdir()
            stack.enter_context(kept_up(folder / name / "door", functools.partial(_chosen, sites)))
        # Before the first SuperNode, whose thread greets the SuperLink: a fork at that very moment
        # inherits locks of OpenSSL that nobody would ever open. Runs wait for their sites.
        runs = {method: stack.enter_context(_run(folder, address, method)) for method in DIGITS}
        for name in NAMES:
            node = SuperNode(folder / name / "door", folder / name / "flower", address, "", "")
            stack.callback(node.stop)
            node.start()
        yield Network(folder, address, runs, seen=stack.enter_context(_watched(folder)))


def parties() -> list[Any]:
    """Five agents of the conformance suite."""
    return conformance.agents(4, 7, 5, 3, 6)


def _sites(folder: Path) -> dict[str, dict[bytes, Handler]]:
    """What is behind each socket, by the first byte of requests to it."""
    found: dict[str, dict[bytes, Handler]] = {name: {} for name in NAMES}
    for name, agent in zip(NAMES, parties(), strict=True):
        found[name][CONFORMANCE] = transports.make_handler(
            agent, STEPS, folder / "conformance"
        ).handle
    for method, mark in MARKS.items():
        (folder / f"{method}.yaml").write_text(on_digits(method))
        assert tuple(write_sites(folder / method, folder / f"{method}.yaml", [])) == NAMES
        for name in NAMES:
            site = settings.load_site_config(folder / method / name / "site.yaml")
            found[name][mark] = startup.open_site(site).handle
    return found


def _chosen(sites: Mapping[bytes, Handler], frame: bytes) -> bytes:
    return sites[frame[:1]](frame[1:])


@contextlib.contextmanager
def kept_up(path: Path, handle: Handler) -> Iterator[None]:
    """A process behind a socket, and another one whenever it dies."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads beside a fork
        keeper = os.fork()
    if keeper == 0:
        os.setpgid(0, 0)
        while True:
            if os.fork() == 0:
                try:
                    socket_server.serve(path, handle)
                finally:
                    os._exit(1)
            os.wait()
    try:
        yield
    finally:
        os.killpg(keeper, signal.SIGKILL)
        os.waitpid(keeper, 0)


class Marked:
    """A transport to one of the sites behind each socket."""

    def __init__(self, transport: FlowerTransport, mark: bytes) -> None:
        self._transport, self._mark = transport, mark

    def addresses(self) -> Sequence[str]:
        return self._transport.addresses()

    def exchange(self, frames: Mapping[str, bytes], seconds: float) -> Mapping[str, bytes]:
        return self._transport.exchange(
            {a: self._mark + said for a, said in frames.items()}, seconds
        )

    def close(self) -> None:
        self._transport.close()


@contextlib.contextmanager
def _run(folder: Path, address: str, method: str) -> Iterator[BaseProcess]:
    """The training command over the sites of a method, under way."""
    process = multiprocessing.get_context("fork").Process(
        target=_train, args=(folder, address, method)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads beside a fork
        process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def _train(folder: Path, address: str, method: str) -> None:
    """In a process of its own, whose status is that of the command."""
    faulthandler.dump_traceback_later(HUNG, exit=True)
    patch, there = pytest.MonkeyPatch(), place(folder, method)
    patch.setattr(
        engine_factory, "FlowerTransport", lambda *to: Marked(FlowerTransport(*to), MARKS[method])
    )
    how = ("run.engine=flower", f"run.superlink={address}", f"run.join_seconds={LONG}", "--quiet")
    outcome = command(there.config, there.output, *how)
    print(outcome.out, outcome.err)
    sys.exit(outcome.status)


def place(folder: Path, method: str) -> Place:
    return Place(folder / method / "experiment.yaml", folder / method / "run")


@contextlib.contextmanager
def _watched(folder: Path) -> Iterator[set[str]]:
    """Remote addresses of Flower's processes under a folder, looked at every half second."""
    seen, over = set[str](), threading.Event()

    def watch() -> None:
        while not over.wait(0.5):
            seen.update(_connections(folder))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def _connections(folder: Path) -> set[str]:
    """Remote addresses of the TCP connections of Flower's processes under a folder."""
    inodes = {}
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            cells = line.split()
            raw = bytes.fromhex(cells[2].partition(":")[0])
            words = b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4))
            address = socket.inet_ntop(family, words)
            if address not in ("0.0.0.0", "::"):
                inodes[cells[9]] = address.removeprefix("::ffff:")
    found = set()
    for process in (name for name in os.listdir("/proc") if name.isdigit()):
        with contextlib.suppress(OSError):
            if bytes(folder) not in Path(f"/proc/{process}/environ").read_bytes():
                continue
            for file in os.listdir(f"/proc/{process}/fd"):
                target = os.readlink(f"/proc/{process}/fd/{file}")
                inode = target.removeprefix("socket:[").removesuffix("]")
                if inode in inodes:
                    found.add(inodes[inode])
    return found


# What every engine owes ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def there(network: Network) -> Iterator[SitesEngine]:
    """An engine over five sites that do the steps of the conformance suite."""
    engine = SitesEngine(
        Marked(FlowerTransport(network.address, ""), CONFORMANCE),
        [agent.ref for agent in parties()],
        algorithm=STEPS,
        agreement=transports.AGREED,
        home=LocalEngine([], seed=3, device=transports.CPU),
        timeouts=PATIENT,
    )
    with contextlib.closing(engine):
        yield engine


def test_replies_come_in_order_with_the_bits_of_other_engines_and_a_replay_is_the_same(
    there: SitesEngine,
) -> None:
    told, order = Told(number=2.0), "q3 q0 q4 q1 q2"
    first = ask(there, STEPS.draw, told, order)
    assert " ".join(reply.sender.id for reply in first) == order
    for other in ("local", "2 workers"):
        with conformance.made(other, parties()) as reference:
            assert conformance.all_same(first, ask(reference, STEPS.draw, told, order))
    assert conformance.all_same(ask(there, STEPS.draw, told, "q4 q0"), [first[2], first[1]])


def test_calls_of_one_agent_see_the_last_and_memories_stay_at_sites_and_are_put_back(
    there: SitesEngine,
) -> None:
    there.restore({})
    assert [r.payload.number for r in ask(there, STEPS.count, whom="q0 q0")] == [1.0, 2.0]
    before, whom = there.memories(), "q1 q0"
    assert [r.payload.number for r in ask(there, STEPS.count, None, whom, 2)] == [1.0, 3.0]
    there.restore(before)
    assert [r.payload.number for r in ask(there, STEPS.count, None, whom, 2)] == [1.0, 3.0]


def test_declining_and_errors_stay_in_their_place_and_the_first_by_order_ends_a_run(
    there: SitesEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(there, "_timeouts", dataclasses.replace(PATIENT, absent="skip"))
        patch.setattr(there, "_policy", MissingReplyPolicy(skip=("fail", "diverge")))
        steps = (STEPS.fail, STEPS.fail, STEPS.hush, STEPS.fail, STEPS.diverge)
        replies = list(
            there.deliver(
                [Call(a, step, Told(), 1) for a, step in zip(there.roster(), steps, strict=True)]
            )
        )
    absent = [r.content.reason if isinstance(r.content, NoReply) else "" for r in replies]
    assert absent == ["data", "failed", "", "", "diverged"]
    assert replies[2].declined and replies[3].payload.text == "q3"
    with pytest.raises(SiteError, match=r"q1 has no reply to fail .*\(failed\)"):
        ask(there, STEPS.fail, whom="q3 q1 q0", number=2)


def test_large_requests_are_carried_whole(there: SitesEngine) -> None:
    wide = Told(w={"a": torch.arange(5_000_000.0)})  # 20 MB: Flower cuts it into pieces
    said = ask(there, STEPS.scribble, wide, whom="q1")[0].payload
    assert said.w["a"].shape == (5_000_000,) and float(said.w["a"].min()) == 9.0


def test_a_visit_whose_site_is_killed_is_done_by_the_next_process_to_the_same_bits(
    there: SitesEngine, tmp_path: Path
) -> None:
    marker = tmp_path / "died"
    told, order = Told(text=str(marker)), "q2 q1 q0"
    replies = ask(there, STEPS.die_once, told, order)
    assert marker.exists()
    with conformance.made("local", parties()) as reference:
        assert conformance.all_same(replies, ask(reference, STEPS.die_once, told, order))


# The same bits ---------------------------------------------------------------------------------


@pytest.mark.parametrize("method", DIGITS)
def test_five_sites_over_flower_come_to_the_weights_of_one_process_and_of_workers(
    network: Network, tmp_path: Path, method: str
) -> None:
    there = place(network.folder, method)
    network.runs[method].join(HUNG + 60)
    assert network.runs[method].exitcode == 0
    for workers in (1, 2):
        here = Place(there.config, tmp_path / f"{workers}")
        assert command(here.config, here.output, f"run.workers={workers}", "--quiet").status == 0
        mine, expected = there.weights(), here.weights()
        assert mine.keys() == expected.keys()
        assert all((w == expected[name]).all() for name, w in mine.items())


# Nothing leaves loopback -------------------------------------------------------------------------


def test_no_process_of_flower_had_a_connection_beyond_loopback(network: Network) -> None:
    for run in network.runs.values():
        run.join(HUNG + 60)
    assert network.seen, "the control: there are connections"
    assert [one for one in network.seen if not one.startswith(("127.", "::1"))] == []


@pytest.mark.slow
def test_a_whole_deployment_looks_for_no_way_out_of_loopback(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(PRIVATE)
    small = ("agents.support=1", "agents.query=1", "algorithm.rounds=1")
    demonstration = ("privssl.site.demo", tmp_path / "sites", "--config", tmp_path / "c.yaml")
    looks, said = ways_out("-m", *demonstration, *small)
    assert looks == 0
    told = ("2 sites: s0, q0", "Finished. 1 rounds", "steps run", "GUARANTEE", "CONSISTENT")
    places = [said.rfind(words) for words in told]
    assert places[0] >= 0 and places == sorted(places), said
    # The control: Flower itself, when it is not told what our launchers tell it.
    looks, said = ways_out(flower_transport.program("flwr"), "--version")
    assert looks > 0 and "Flower version" in said


def ways_out(*program: object) -> tuple[int, str]:
    """How often a Python program, or what it starts, looks for a route that there is not.

    It runs where the network is loopback and nothing else; the system counts there. The second
    value is what it said.
    """
    if not shutil.which("ip") or subprocess.run([*ALONE, "true"], check=False).returncode:
        pytest.skip("this system makes no network namespace for us (unshare, ip)")
    inside = 'ip link set lo up && "$@" >&2 && cat /proc/net/snmp /proc/net/snmp6'
    done = subprocess.run(
        [*ALONE, "sh", "-c", inside, "sh", sys.executable, *map(str, program)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    lines = [line.split() for line in done.stdout.splitlines()]
    names, values = (line for line in lines if line[0] == "Ip:")
    [six] = [line[1] for line in lines if line[0] == "Ip6OutNoRoutes"]
    return int(values[names.index("OutNoRoutes")]) + int(six), done.stderr


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
            end = time.monotonic() + 120
            while not (self.folder / name / "door").exists():
                assert time.monotonic() < end, f"{name} did not start"
                time.sleep(0.1)
        self.run = self.folder / "run"
        self.train = demo.train(self.folder, self.address, *HOW)

    def link(self, port: int = 0) -> str:
        return self.stack.enter_context(superlink(self.folder / "superlink", port))

    def start(self, name: str) -> None:
        opened = demo.site(self.folder / name, self.address)
        self.sites[name] = self.stack.enter_context(opened)

    def worked(self, name: str) -> set[str]:
        """The visits that a site has done, by its log."""
        path = self.folder / name / "site.log"
        lines = path.read_text().splitlines() if path.exists() else []
        return {line.split("Step ")[1] for line in lines if line.endswith(" done")}

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


def kill(processes: Iterable[int]) -> None:
    """SIGKILL to each."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


@pytest.mark.slow
def test_a_private_run_survives_kills_at_six_moments_and_no_ledger_is_below_what_was_released(
    tmp_path: Path,
) -> None:
    with contextlib.ExitStack() as stack:
        there = Deployment(tmp_path, stack)

        # 1: a site in the middle of a visit, as soon as the visit is charged; its SuperNode ends
        # with it.
        there.until(lambda: there.charged("s0") == 1, "the first charge")
        os.killpg(there.sites["s0"].pid, signal.SIGKILL)
        there.start("s0")

        # 2: a SuperNode, whose site goes on and gets its requests from another one.
        kill(ours("flower-supernode", there.folder / "q1"))
        there.until(lambda: there.rounds() >= 1, "a round after the death of a site")
        there.until(lambda: there.worked("q1"), "a visit after the death of a SuperNode")

        # 3: the carrier beside the coordinator.
        done = there.rounds()
        kill(ours("flwr-serverapp", there.folder))
        there.until(lambda: there.rounds() > done, "a round after the death of the carrier")

        # 4: the process of Flower that brings a request.
        there.until(lambda: ours("flwr-clientapp", there.folder), "a letter on its way")
        done = there.rounds()
        kill(ours("flwr-clientapp", there.folder)[:1])
        there.until(lambda: there.rounds() > done, "a round after the death of a bringer")

        # 5: the SuperLink, which forgets its runs.
        port, done = int(there.address.rpartition(":")[2]), there.rounds()
        kill(ours("", there.folder / "superlink"))
        time.sleep(1)
        there.link(port)
        there.until(lambda: there.rounds() > done, "a round after the death of the SuperLink")

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
            worked = there.worked(name)
            # The control: kill 1 hit a visit that was charged, and of which nothing came.
            assert len(worked) <= there.charged(name) - (name == "s0")
            journal = read_journal(there.folder / name / "ledger" / f"{name}.jsonl")
            assert journal.problems == [] and journal.epsilon <= 9.0
    assert there.rounds() == 7
