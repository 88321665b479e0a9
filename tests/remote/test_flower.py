"""Runs over Flower: one SuperLink and five SuperNodes on loopback, shared by all tests here.

Sites and their engine are tested without a network (test_engine_conformance.py,
test_remote_engine.py, test_run_over_sites.py). These tests check that Flower delivers their
requests, and that failures of Flower's processes only delay a run. They need privssl[flower].

Every request costs Flower seconds and a process. So the SuperNodes are started once, and each
socket serves a conformance site and one site for each of five algorithms; the first byte of a
request selects the site. The runs of the five algorithms start first and go on in parallel, each
with its own relay, while the conformance tests use the same SuperNodes.
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
from tests.support.engine_conformance import STEPS, Payload, run_step
from tests.support.resume import RunPaths
from tests.support.run_over_sites import DIGITS, on_digits

FLOWER = (Path(sys.executable).parent / "flwr").exists() or shutil.which("flwr")
pytestmark = [
    pytest.mark.flower,
    pytest.mark.skipif(not FLOWER, reason="Flower is not installed: pip install '.[flower]'"),
]
NAMES = ("s0", "s1", "q0", "q1", "q2")
#: Six runs start at once, each with several processes of Flower: slow machines need minutes.
LONG_SECONDS = 1200.0
LONG_TIMEOUTS = RemoteTimeouts(
    join_seconds=LONG_SECONDS, visit_seconds=LONG_SECONDS, hello_seconds=LONG_SECONDS
)
HUNG_SECONDS = 2 * LONG_SECONDS  # seconds after which a run prints its stack and ends
Handler = Callable[[bytes], bytes]
#: Prefix of a command that runs in its own network namespace.
OWN_NETWORK = ["unshare", "--map-root-user", "--net"]

#: First byte of a request: selects the site behind a socket.
CONFORMANCE = b"-"
MARKS = {method: str(number).encode() for number, method in enumerate(DIGITS)}


# The network -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Network:
    """A SuperLink, SuperNodes, and the sites of running runs behind their sockets."""

    folder: Path
    address: str
    runs: Mapping[str, BaseProcess]  # by method
    seen: set[str]  # remote addresses of all connections so far


def methods_asked_for(items: Sequence[pytest.Item]) -> list[str]:
    """The methods whose cases run; FedSSL at least."""
    cases = {item.callspec.id for item in items if hasattr(item, "callspec")}
    return [method for method in DIGITS if method == "fedssl" or method in cases]


@pytest.fixture(scope="module")
def network(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Network]:
    folder = tmp_path_factory.mktemp("net")
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(demo, "START_SECONDS", LONG_SECONDS)
        for limit in ("START_SECONDS", "GRACE_SECONDS"):
            patch.setattr(flower_transport, limit, LONG_SECONDS)
        address = stack.enter_context(superlink(folder / "link"))
        for name, sites in _sites(folder).items():
            (folder / name).mkdir()
            stack.enter_context(
                served_by_restarting_process(
                    folder / name / "door", functools.partial(_handle_by_mark, sites)
                )
            )
        # Fork the runs before the first SuperNode connects: a fork during its handshake would
        # inherit locked locks of OpenSSL. The runs wait for their sites.
        runs = {
            method: stack.enter_context(_run(folder, address, method))
            for method in methods_asked_for(request.session.items)
        }
        for name in NAMES:
            node = SuperNode(folder / name / "door", folder / name / "flower", address, "", "")
            stack.callback(node.stop)
            node.start()
        yield Network(folder, address, runs, seen=stack.enter_context(_addresses_recorded(folder)))


def conformance_agents() -> list[Any]:
    """Five agents of the conformance suite."""
    return conformance.agents(4, 7, 5, 3, 6)


def _sites(folder: Path) -> dict[str, dict[bytes, Handler]]:
    """The handlers behind each socket, by the first byte of a request."""
    found: dict[str, dict[bytes, Handler]] = {name: {} for name in NAMES}
    for name, agent in zip(NAMES, conformance_agents(), strict=True):
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


def _handle_by_mark(sites: Mapping[bytes, Handler], frame: bytes) -> bytes:
    return sites[frame[:1]](frame[1:])


@contextlib.contextmanager
def served_by_restarting_process(path: Path, handle: Handler) -> Iterator[None]:
    """Serve a socket from a process that is restarted whenever it dies."""
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


class MarkedTransport:
    """A transport that prefixes requests with the byte of a site."""

    def __init__(self, transport: FlowerTransport, mark: bytes) -> None:
        self._transport, self._mark = transport, mark

    def addresses(self) -> Sequence[str]:
        return self._transport.addresses()

    def exchange(self, frames: Mapping[str, bytes], seconds: float) -> Mapping[str, bytes]:
        return self._transport.exchange(
            {a: self._mark + output for a, output in frames.items()}, seconds
        )

    def close(self) -> None:
        self._transport.close()


@contextlib.contextmanager
def _run(folder: Path, address: str, method: str) -> Iterator[BaseProcess]:
    """Run the training command over the sites of a method in the background."""
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
    """Run the training command; exit with its status."""
    faulthandler.dump_traceback_later(HUNG_SECONDS, exit=True)
    patch, paths = pytest.MonkeyPatch(), run_paths(folder, method)
    patch.setattr(
        engine_factory,
        "FlowerTransport",
        lambda *to: MarkedTransport(FlowerTransport(*to), MARKS[method]),
    )
    how = (
        "run.engine=flower",
        f"run.superlink={address}",
        f"run.join_seconds={LONG_SECONDS}",
        "--quiet",
    )
    outcome = command(paths.config, paths.output, *how)
    print(outcome.out, outcome.err)
    sys.exit(outcome.status)


def run_paths(folder: Path, method: str) -> RunPaths:
    return RunPaths(folder / method / "experiment.yaml", folder / method / "run")


@contextlib.contextmanager
def _addresses_recorded(folder: Path) -> Iterator[set[str]]:
    """Record remote addresses of Flower's processes under a folder every half second."""
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


# Engine conformance ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(network: Network) -> Iterator[SitesEngine]:
    """An engine over five conformance sites."""
    engine = SitesEngine(
        MarkedTransport(FlowerTransport(network.address, ""), CONFORMANCE),
        [agent.ref for agent in conformance_agents()],
        algorithm=STEPS,
        agreement=transports.AGREEMENT,
        home=LocalEngine([], seed=3, device=transports.CPU),
        timeouts=LONG_TIMEOUTS,
    )
    with contextlib.closing(engine):
        yield engine


def test_replies_keep_their_order_and_equal_those_of_other_engines_also_when_repeated(
    engine: SitesEngine,
) -> None:
    request, order = Payload(number=2.0), "q3 q0 q4 q1 q2"
    first = run_step(engine, STEPS.draw, request, order)
    assert " ".join(reply.sender.id for reply in first) == order
    for other in ("local", "2 workers"):
        with conformance.running_engine(other, conformance_agents()) as reference:
            assert conformance.same_replies(first, run_step(reference, STEPS.draw, request, order))
    assert conformance.same_replies(
        run_step(engine, STEPS.draw, request, "q4 q0"), [first[2], first[1]]
    )


def test_calls_of_one_agent_see_its_memory_and_memories_can_be_restored(
    engine: SitesEngine,
) -> None:
    engine.restore({})
    assert [r.payload.number for r in run_step(engine, STEPS.count, whom="q0 q0")] == [1.0, 2.0]
    before, whom = engine.memories(), "q1 q0"
    assert [r.payload.number for r in run_step(engine, STEPS.count, None, whom, 2)] == [1.0, 3.0]
    engine.restore(before)
    assert [r.payload.number for r in run_step(engine, STEPS.count, None, whom, 2)] == [1.0, 3.0]


def test_declined_and_failed_replies_keep_their_order_and_the_first_error_is_raised(
    engine: SitesEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_timeouts", dataclasses.replace(LONG_TIMEOUTS, absent="skip"))
        patch.setattr(engine, "_policy", MissingReplyPolicy(skip=("fail", "diverge")))
        steps = (STEPS.fail, STEPS.fail, STEPS.decline, STEPS.fail, STEPS.diverge)
        replies = list(
            engine.deliver(
                [
                    Call(a, step, Payload(), 1)
                    for a, step in zip(engine.roster(), steps, strict=True)
                ]
            )
        )
    absent = [r.content.reason if isinstance(r.content, NoReply) else "" for r in replies]
    assert absent == ["data", "failed", "", "", "diverged"]
    assert replies[2].declined and replies[3].payload.text == "q3"
    with pytest.raises(SiteError, match=r"q1 has no reply to fail .*\(failed\)"):
        run_step(engine, STEPS.fail, whom="q3 q1 q0", number=2)


def test_a_large_request_arrives_complete(engine: SitesEngine) -> None:
    wide = Payload(w={"a": torch.arange(5_000_000.0)})  # 20 MB: Flower cuts it into pieces
    payload = run_step(engine, STEPS.overwrite_input, wide, whom="q1")[0].payload
    assert payload.w["a"].shape == (5_000_000,) and float(payload.w["a"].min()) == 9.0


def test_a_visit_whose_site_is_killed_is_repeated_by_the_next_process_with_the_same_bits(
    engine: SitesEngine, tmp_path: Path
) -> None:
    marker = tmp_path / "died"
    request, order = Payload(text=str(marker)), "q2 q1 q0"
    replies = run_step(engine, STEPS.die_once, request, order)
    assert marker.exists()
    with conformance.running_engine("local", conformance_agents()) as reference:
        assert conformance.same_replies(
            replies, run_step(reference, STEPS.die_once, request, order)
        )


# Equal bits ------------------------------------------------------------------------------------


@pytest.mark.fast_cases("fedssl")
@pytest.mark.parametrize("method", DIGITS)
def test_five_sites_over_flower_end_with_the_weights_of_one_process_and_of_workers(
    network: Network, tmp_path: Path, method: str
) -> None:
    paths = run_paths(network.folder, method)
    network.runs[method].join(HUNG_SECONDS + 60)
    assert network.runs[method].exitcode == 0
    for workers in (1, 2):
        here = RunPaths(paths.config, tmp_path / f"{workers}")
        assert command(here.config, here.output, f"run.workers={workers}", "--quiet").status == 0
        mine, expected = paths.weights(), here.weights()
        assert mine.keys() == expected.keys()
        assert all((w == expected[name]).all() for name, w in mine.items())


# Nothing leaves loopback -------------------------------------------------------------------------


def test_flowers_processes_connect_only_to_loopback(network: Network) -> None:
    for run in network.runs.values():
        run.join(HUNG_SECONDS + 60)
    assert network.seen, "the control: there are connections"
    assert [one for one in network.seen if not one.startswith(("127.", "::1"))] == []


@pytest.mark.slow
def test_a_deployment_seeks_no_route_beyond_loopback(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(PRIVATE)
    small = ("agents.support=1", "agents.query=1", "algorithm.rounds=1")
    demonstration = ("privssl.site.demo", tmp_path / "sites", "--config", tmp_path / "c.yaml")
    routes_sought, output = count_routes_sought("-m", *demonstration, *small)
    assert routes_sought == 0
    milestones = ("2 sites: s0, q0", "Finished. 1 rounds", "steps run", "GUARANTEE", "CONSISTENT")
    places = [output.rfind(text) for text in milestones]
    assert places[0] >= 0 and places == sorted(places), output
    # The control: Flower without the settings of our launchers.
    routes_sought, output = count_routes_sought(flower_transport.program("flwr"), "--version")
    assert routes_sought > 0 and "Flower version" in output


def count_routes_sought(*program: object) -> tuple[int, str]:
    """Run a Python program in a network namespace with loopback only.

    Returns:
        How often it or its children sought a route that does not exist, and its output.
    """
    if not shutil.which("ip") or subprocess.run([*OWN_NETWORK, "true"], check=False).returncode:
        pytest.skip("this system makes no network namespace for us (unshare, ip)")
    inside = 'ip link set lo up && "$@" >&2 && cat /proc/net/snmp /proc/net/snmp6'
    done = subprocess.run(
        [*OWN_NETWORK, "sh", "-c", inside, "sh", sys.executable, *map(str, program)],
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
RUN_SETTINGS = ("run.absent=skip", "run.quorum=0.5", "run.visit_seconds=60.0", "--quiet")


class Deployment:
    """A coordinator, a SuperLink and five sites with SuperNodes, each a process that tests kill."""

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
        self.train = demo.train(self.folder, self.address, *RUN_SETTINGS)

    def link(self, port: int = 0) -> str:
        return self.stack.enter_context(superlink(self.folder / "superlink", port))

    def start(self, name: str) -> None:
        opened = demo.site(self.folder / name, self.address)
        self.sites[name] = self.stack.enter_context(opened)

    def worked(self, name: str) -> set[str]:
        """The visits that a site has completed, from its log."""
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


def flower_processes(pattern: str, folder: Path) -> list[int]:
    """Processes of Flower under a folder whose command line contains ``pattern``."""
    found = []
    for process in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        with contextlib.suppress(OSError):
            about = Path(f"/proc/{process}")
            settings_ = (about / "environ").read_bytes().split(b"\0")
            home = [part for part in settings_ if part.startswith(b"FLWR_HOME=" + bytes(folder))]
            arguments = (about / "cmdline").read_bytes().replace(b"\0", b" ")
            if home and pattern.encode() in arguments:
                found.append(process)
    return found


def kill(processes: Iterable[int]) -> None:
    """SIGKILL to each."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


@pytest.mark.slow
def test_a_private_run_survives_six_kills_and_every_released_result_was_charged(
    tmp_path: Path,
) -> None:
    with contextlib.ExitStack() as stack:
        deployment = Deployment(tmp_path, stack)

        # 1: kill a site during a visit, as soon as it is charged. Its SuperNode ends with it.
        deployment.until(lambda: deployment.charged("s0") == 1, "the first charge")
        os.killpg(deployment.sites["s0"].pid, signal.SIGKILL)
        deployment.start("s0")

        # 2: kill a SuperNode. Its site continues with a new SuperNode.
        kill(flower_processes("flower-supernode", deployment.folder / "q1"))
        deployment.until(lambda: deployment.rounds() >= 1, "a round after the death of a site")
        deployment.until(lambda: deployment.worked("q1"), "a visit after the death of a SuperNode")

        # 3: kill the ServerApp beside the coordinator.
        done = deployment.rounds()
        kill(flower_processes("flwr-serverapp", deployment.folder))
        deployment.until(
            lambda: deployment.rounds() > done, "a round after the death of the ServerApp"
        )

        # 4: kill a ClientApp, the process of Flower that delivers a request.
        deployment.until(
            lambda: flower_processes("flwr-clientapp", deployment.folder), "a request in transit"
        )
        done = deployment.rounds()
        kill(flower_processes("flwr-clientapp", deployment.folder)[:1])
        deployment.until(
            lambda: deployment.rounds() > done, "a round after the death of a ClientApp"
        )

        # 5: kill the SuperLink, which loses its runs.
        port, done = int(deployment.address.rpartition(":")[2]), deployment.rounds()
        kill(flower_processes("", deployment.folder / "superlink"))
        time.sleep(1)
        deployment.link(port)
        deployment.until(
            lambda: deployment.rounds() > done, "a round after the death of the SuperLink"
        )

        # 6: kill the coordinator during a round.
        charged = deployment.charged("s0")
        deployment.until(lambda: deployment.charged("s0") > charged, "another visit")
        deployment.train.kill()
        deployment.train.wait()
        deployment.train = demo.train(
            deployment.folder,
            deployment.address,
            *RUN_SETTINGS,
            "--resume",
            str(deployment.run),
            output=False,
        )
        assert deployment.train.wait(timeout=400) == 0

        for name in ("s0", "s1"):
            worked = deployment.worked(name)
            # The control: kill 1 hit a charged visit that never completed.
            assert len(worked) <= deployment.charged(name) - (name == "s0")
            journal = read_journal(deployment.folder / name / "ledger" / f"{name}.jsonl")
            assert journal.problems == [] and journal.epsilon <= 9.0
    assert deployment.rounds() == 7
