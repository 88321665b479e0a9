"""Flower with TLS and registered keys: authentication, identity and error messages.

A SuperLink, SuperNodes, sites and the training command on loopback. test_site_keys.py tests each
side alone. All tests are slow and need privssl[flower].
"""

import contextlib
import io
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from rich.console import Console

from accounting.ledger import read_journal
from privssl.core.agents import Agent, AgentRef
from privssl.engines.local import LocalEngine
from privssl.engines.remote import SitesEngine
from privssl.remote import protocol
from privssl.remote.discovery import RemoteTimeouts, SiteError
from privssl.remote.flower_transport import FlowerTransport
from privssl.remote.node_keys import NodeKeys
from privssl.remote.protocol import EndOfRun, IdentifyRequest, StepRequest
from privssl.site import demo, keys
from privssl.site.supernode import SuperNode
from tests.support import certificates, transports
from tests.support.engine_conformance import STEPS, agents, run_step
from tests.support.site import serving

certificates.skip_without_cryptography()
FLOWER = (Path(sys.executable).parent / "flwr").exists() or shutil.which("flwr")
pytestmark = [
    pytest.mark.flower,
    pytest.mark.slow,
    pytest.mark.skipif(not FLOWER, reason="Flower is not installed: pip install '.[flower]'"),
]
PRIVATE = """
data: {name: toy, labelled: 24, unlabelled: 60}
agents: {support: 1, query: 1}
model: {name: small_cnn, width: 4}
algorithm:
  {name: fedssl, rounds: 1, local_steps: 1, batch_size: 8, generator_width: 4, gate: 0.0,
   warm_up: 0}
privacy: {epsilon: 9.0, delta: 1.0e-3, noise_multiplier: 2.0, sample_rate: 1.0, steps: 2}
run: {images_every: 1000}
"""


# Names and keys -----------------------------------------------------------------------------------


class Link:
    """A SuperLink with TLS, SuperNodes with the keys of q0 and q1, and a transport."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.folder, self.keys = folder, folder / "keys"
        keys.make(self.keys, "127.0.0.1", ["q0", "q1", "q2"])
        self.address = stack.enter_context(demo.superlink(folder / "link", made=self.keys))
        self.pins = NodeKeys(self.keys, ["q0", "q1"])
        self.transport = FlowerTransport(self.address, str(self.keys / "ca.crt"), self.pins)
        stack.callback(self.transport.close)
        for name in ("q0", "q1"):
            (folder / name).mkdir()
            node = SuperNode(
                self.socket_path(name), folder / name / "flower", self.address,
                str(self.keys / "ca.crt"), str(self.keys / name),
            )  # fmt: skip
            stack.callback(node.stop)
            node.start()
        until(lambda: len(self.transport.addresses()) == 2, "two SuperNodes")

    def socket_path(self, name: str) -> Path:
        return self.folder / name / "door"

    def engine(self, *names: str, seconds: float = 60.0) -> SitesEngine:
        return SitesEngine(
            self.transport,
            [AgentRef(name, "query") for name in names],
            algorithm=STEPS,
            agreement=transports.AGREEMENT,
            home=LocalEngine([], seed=3, device=transports.CPU),
            timeouts=RemoteTimeouts(join_seconds=seconds, visit_seconds=60.0),
            key_owner=self.transport.key_owner,
        )


def until(true: Callable[[], bool], what: str, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"never came: {what}"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Link]:
    with contextlib.ExitStack() as stack:
        yield Link(tmp_path_factory.mktemp("tls"), stack)


def queries(*names: str) -> list[Agent]:
    return [agent for agent in agents() if agent.id in names]


def test_the_coordinator_identifies_each_site_by_its_signing_key(
    link: Link, tmp_path: Path
) -> None:
    assert sorted(map(link.transport.key_owner, link.transport.addresses())) == ["q0", "q1"]
    with contextlib.ExitStack() as stack:
        for agent in queries("q0", "q1"):
            handler = transports.make_handler(agent, STEPS, tmp_path)
            stack.enter_context(serving(link.socket_path(agent.id), handler.handle))
        engine = link.engine("q0", "q1")
        assert {n: link.transport.key_owner(a) for n, a in engine._sites.address.items()} == {
            "q0": "q0", "q1": "q1",
        }  # fmt: skip
        assert [reply.sender.id for reply in run_step(engine, STEPS.draw, whom="q0 q1")] == [
            "q0",
            "q1",
        ]


def test_a_registered_site_with_the_name_of_an_absent_agent_is_refused_and_not_visited(
    link: Link, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [q0] = queries("q0")
    sent: list[bytes] = []
    deliver = link.transport.exchange

    def exchange(frames: Mapping[str, bytes], seconds: float) -> Mapping[str, bytes]:
        sent.extend(frames.values())
        return deliver(frames, seconds)

    monkeypatch.setattr(link.transport, "exchange", exchange)
    impostor = serving(link.socket_path("q1"), transports.make_handler(q0, STEPS, tmp_path).handle)
    # q0's own SuperNode runs, but no site serves its socket.
    with impostor, pytest.raises(SiteError, match="with the key of q1 says that it is q0"):
        link.engine("q0", seconds=20.0)
    expected = (IdentifyRequest, StepRequest, EndOfRun)
    kinds = {type(protocol.from_bytes(frame, *expected)) for frame in sent}
    assert IdentifyRequest in kinds and StepRequest not in kinds


def test_a_registered_key_of_no_agent_has_no_owner(link: Link, tmp_path: Path) -> None:
    others = NodeKeys(link.keys, ["q2"])
    assert [others.owner(link.transport._keys[a]) for a in link.transport.addresses()] == ["", ""]


# Error messages -----------------------------------------------------------------------------------


class Sites:
    """Folders of a support site and a query site, and the output of each side."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        (folder / "c.yaml").write_text(PRIVATE)
        self.folder, self.stack = folder / "sites", stack
        self.names = demo.write_sites(self.folder, folder / "c.yaml", [])

    def start(self, name: str, address: str, *more: str) -> None:
        self.stack.enter_context(demo.site(self.folder / name, address, *more))

    def wait_for_output(self, name: str, text: str) -> None:
        """Wait until a site prints a text to its log and to its terminal."""
        for file in ("site.log", "out"):
            path = self.folder / name / file

            def printed(path: Path = path) -> bool:
                return path.exists() and text in " ".join(path.read_text().split())

            until(printed, f"{file} of {name} with: {text}")

    def coordinator_error(self, address: str, *more: str) -> str:
        """Run the training command, which fails before any visit; return its output."""
        with (self.folder / "said").open("wb+") as file:
            process = demo.train(
                self.folder,
                address,
                "run.join_seconds=5.0",
                "run.overwrite=true",
                *more,
                stream=file,
            )
            assert process.wait(timeout=120) == 2
            file.seek(0)
            return " ".join(file.read().decode().split())

    def charged(self) -> int:
        """The number of charged visits; 0 before there is an account."""
        path = self.folder / "s0" / "ledger" / "s0.jsonl"
        return len(read_journal(path).events) if path.exists() else 0


@pytest.fixture
def sites(tmp_path: Path) -> Iterator[Sites]:
    with contextlib.ExitStack() as stack:
        yield Sites(tmp_path, stack)


def test_sites_without_tls_or_with_an_unknown_key_report_it_and_do_not_join(
    sites: Sites, link: Link
) -> None:
    keys.make(sites.folder / "others", "127.0.0.1", ["s0", "q0"])
    unregistered = (
        "--certificate",
        str(link.keys / "ca.crt"),
        "--key",
        str(sites.folder / "others/q0"),
    )
    sites.start("s0", link.address)
    sites.start("q0", link.address, *unregistered)
    sites.wait_for_output("s0", "speaks TLS. Give its root certificate")
    sites.wait_for_output("q0", "the SuperLink does not know the key of this site")
    printed = sites.coordinator_error(link.address, f"run.certificate={link.keys / 'ca.crt'}")
    assert "2 of 2 sites are not there after 5 s: s0, q0" in printed
    assert "names are pinned to no keys" in printed
    assert sites.charged() == 0


def test_a_site_without_a_key_reports_that_it_needs_one(sites: Sites, link: Link) -> None:
    sites.start("q0", link.address, "--certificate", str(link.keys / "ca.crt"))
    sites.wait_for_output("q0", "requires a key of every site. Give --key")


def test_a_coordinator_without_the_right_certificate_reports_it(sites: Sites, link: Link) -> None:
    keys.make(sites.folder / "others", "127.0.0.1", ["s0"])
    assert "speaks TLS. Give its root certificate" in sites.coordinator_error(link.address)
    other = f"run.certificate={sites.folder / 'others' / 'ca.crt'}"
    printed = sites.coordinator_error(link.address, other)
    assert "the certificate of the SuperLink" in printed and "is refused by" in printed
    assert not (sites.folder / "run" / "checkpoints").exists() and sites.charged() == 0


def test_sites_and_coordinator_report_an_expired_superlink_certificate(
    sites: Sites,
) -> None:
    made = certificates.with_expired_link(sites.folder / "keys", "s0", "q0")
    with demo.superlink(sites.folder / "superlink", made=made) as address:
        for name in ("s0", "q0"):
            sites.start(name, address, *demo.of_site(made, name))
        expired = "certificate has expired. Whoever runs the SuperLink must renew it"
        for name in ("s0", "q0"):
            sites.wait_for_output(name, expired)
        assert expired in sites.coordinator_error(address, *demo.of_coordinator(made))
    assert sites.charged() == 0


def test_an_expired_root_certificate_is_reported_before_anything_starts(
    sites: Sites, link: Link
) -> None:
    old = certificates.expired_root(sites.folder / "old")
    sites.start("s0", link.address, "--certificate", str(old))
    out = sites.folder / "s0" / "out"
    until(lambda: "expired on 2020-02-01. Get a new one" in out.read_text(), "the error")
    assert not (sites.folder / "s0" / "door").exists()
    printed = sites.coordinator_error(link.address, f"run.certificate={old}")
    assert "expired on 2020-02-01. Get a new one" in printed


# Whole runs ---------------------------------------------------------------------------------------


def test_the_demonstration_runs_over_tls_with_pinned_keys_to_a_guarantee(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(PRIVATE)
    console = Console(file=io.StringIO())
    assert demo.demonstrate(tmp_path / "demo", tmp_path / "c.yaml", [], console) == 0
    journal = read_journal(tmp_path / "demo" / "s0" / "ledger" / "s0.jsonl")
    assert journal.problems == [] and len(journal.events) == 1
    assert (tmp_path / "demo" / "run" / "results.json").exists()
