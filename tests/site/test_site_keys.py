"""Keys and certificates of sites without a network of Flower: pins, roots, and handshakes.

test_flower_tls.py has the same with a SuperLink and SuperNodes.
"""

import base64
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from privssl.core.agents import AgentRef
from privssl.engines.local import LocalEngine
from privssl.engines.remote import SitesEngine
from privssl.errors import ConfigError
from privssl.experiment import config as configs
from privssl.remote import protocol, tls
from privssl.remote.discovery import SiteError
from privssl.remote.flower_transport import FlowerTransport
from privssl.remote.node_keys import NodeKeys
from privssl.remote.protocol import IdentifyRequest, StepResponse
from privssl.site import __main__ as site_command
from privssl.site import keys, supernode
from privssl.site.demo import write_sites
from tests.support import certificates, transports
from tests.support.certificates import listening
from tests.support.command_line import assert_refused, command
from tests.support.engine_conformance import STEPS
from tests.support.resume import PLAIN
from tests.support.sites_engine import says

certificates.skip_without_cryptography()
DAY = 86400.0


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys") / "keys"
    keys.make(folder, "127.0.0.1", ["s0", "q0"])
    return folder


# Pins -------------------------------------------------------------------------------------------


def pem(path: Path) -> str:
    """A public key as Flower writes it (SubjectPublicKeyInfo), by ssh-keygen."""
    return run("ssh-keygen", "-e", "-m", "PKCS8", "-f", path)


def run(program: str, *arguments: object) -> str:
    """What a program prints; skips where it is not installed."""
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    asked = [program, *map(str, arguments)]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("bits", [256, 384, 521])
def test_a_key_has_the_form_that_others_give_it_on_every_curve(tmp_path: Path, bits: int) -> None:
    kind = ("-q", "-t", "ecdsa", "-b", bits, "-N", "", "-C", "s0")
    run("ssh-keygen", *kind, "-f", tmp_path / "s0")
    pins = NodeKeys(tmp_path, ["s0"])
    assert pins.owner(pem(tmp_path / "s0.pub")) == "s0"


def test_a_key_belongs_to_the_agent_whose_file_it_is_and_all_others_to_nobody(made: Path) -> None:
    pins = NodeKeys(made, ["s0", "q0"])
    assert [pins.owner(pem(made / f"{name}.pub")) for name in ("s0", "q0")] == ["s0", "q0"]
    assert NodeKeys(made, ["s0"]).owner(pem(made / "q0.pub")) == ""
    both = pem(made / "q0.pub") + pem(made / "s0.pub")  # a SuperLink reads the first alone
    for text in ("", "none", pem(made / "s0.pub")[:-5], both):
        assert pins.owner(text) == ""


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "No such file .* run.keys needs the public key of each site"),
        ("", "not a public ECDSA key"),
        ("ssh-rsa AAAA s0", "not a public ECDSA key"),
        ("ecdsa-sha2-nistp384 AAAA s0", "not a public ECDSA key"),
        ("ecdsa-sha2-nistp384 %%% s0", "not a public ECDSA key"),
        ("é", "not a public ECDSA key"),
    ],
)
def test_a_file_that_is_no_public_key_is_refused(
    tmp_path: Path, content: str | None, text: str
) -> None:
    if content is not None:
        (tmp_path / "s0.pub").write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"s0\.pub: {text}"):
        NodeKeys(tmp_path, ["s0"])


def test_two_agents_with_one_key_are_refused(made: Path, tmp_path: Path) -> None:
    for name in ("q0", "s0"):
        shutil.copy(made / "q0.pub", tmp_path / f"{name}.pub")
    with pytest.raises(ConfigError, match=r"s0\.pub: also the key of q0"):
        NodeKeys(tmp_path, ["q0", "s0"])


# Who is believed ----------------------------------------------------------------------------------

HOLDERS = {"x": "q0", "y": "q1", "z": ""}


def meet(
    handlers: dict[str, Callable[[bytes], bytes]], *names: str, pinned: bool = True
) -> tuple[SitesEngine, transports.InProcessTransport]:
    transport = transports.InProcessTransport(handlers)
    there = SitesEngine(
        transport, [AgentRef(name, "query") for name in names], algorithm=STEPS,
        agreement=transports.AGREED, home=LocalEngine([], seed=0, device=transports.CPU),
        timeouts=transports.SOON,
        key_owner=HOLDERS.__getitem__ if pinned else None,
    )  # fmt: skip
    return there, transport


def test_a_site_that_takes_the_name_of_one_that_is_away_is_refused_by_its_key(
    caplog: pytest.LogCaptureFixture,
) -> None:
    text = r"A site with the key of q1 says that it is q0, and gets no requests"
    with pytest.raises(SiteError, match=rf"1 of 1 sites are not there .*: q0\. {text}"):
        meet({"y": says("q0")}, "q0")
    assert sum("with the key of q1 says" in line for line in caplog.messages) == 1
    there, _ = meet({"y": says("q0")}, "q0", pinned=False)  # the control: it would be believed
    assert there._sites.address == {"q0": "y"}


def test_an_impostor_neither_stops_a_run_nor_is_visited() -> None:
    there, transport = meet({"x": says("q0"), "y": says("q0"), "z": says("q0")}, "q0")
    assert there._sites.address == {"q0": "x"}
    assert "z" not in [address for address, _ in transport.sent], (
        "a key of nobody is not even asked"
    )
    with pytest.raises(SiteError, match="Two sites call themselves q0"):  # the control
        meet({"x": says("q0"), "y": says("q0")}, "q0", pinned=False)


def test_a_site_that_mends_its_name_is_taken() -> None:
    asked: list[bytes] = []

    def mended(frame: bytes) -> bytes:
        asked.append(frame)
        return says("q0" if len(asked) == 1 else "q1")(frame)

    there, _ = meet({"y": mended}, "q1")
    assert there._sites.address == {"q1": "y"} and len(asked) == 2
    assert all(protocol.from_bytes(frame, IdentifyRequest) for frame in asked)


def test_who_stops_a_run_is_named_by_its_key() -> None:
    old: Callable[[bytes], bytes] = lambda _: protocol.to_bytes(StepResponse("", error="version"))  # noqa: E731
    with pytest.raises(SiteError, match=r"part \(with the key of q1\) cannot: it has another ver"):
        meet({"y": old}, "q1")


def test_a_run_with_tls_and_without_pins_is_warned_of_once(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(PLAIN)

    def warned(*more: str) -> int:
        config = configs.load_config(tmp_path / "c.yaml", ["run.engine=flower", *more])
        return sum("names are pinned to no keys" in text for text in config.warnings)

    assert warned("run.certificate=ca.crt") == 1
    assert warned("run.certificate=ca.crt", "run.keys=keys") == 0
    assert warned() == 0  # on loopback, for a trial


def test_keys_that_are_missing_stop_a_run_before_flower_is_asked(
    tmp_path: Path, made: Path
) -> None:
    (tmp_path / "c.yaml").write_text(PLAIN)
    outcome = command(
        tmp_path / "c.yaml",
        f"run.output={tmp_path / 'run'}",
        "run.engine=flower",
        f"run.keys={made}",
    )
    assert_refused(outcome, "s1.pub: No such file", "run.keys needs the public key of each site")


# Roots --------------------------------------------------------------------------------------------


def test_a_root_that_is_good_is_taken_and_one_that_expires_soon_is_spoken_of(made: Path) -> None:
    now = time.time()
    assert tls.check_root(made / "ca.crt") == ""
    assert tls.check_root(made / "ca.crt", now + 75 * DAY) == ""
    assert "expires on" in tls.check_root(made / "ca.crt", now + 77 * DAY)
    with pytest.raises(ConfigError, match=r"expired on .* Get a new one"):
        tls.check_root(made / "ca.crt", now + 91 * DAY)
    with pytest.raises(ConfigError, match=r"not valid before .* clock of this machine"):
        tls.check_root(made / "ca.crt", now - DAY)


@pytest.mark.parametrize(
    ("name", "text"),
    [("link.crt", "a server's certificate"), ("s0.pub", "not a certificate"),
     ("none.crt", "No such file")],
)  # fmt: skip
def test_a_file_that_is_no_root_is_refused(made: Path, name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        tls.check_root(made / name)


def test_the_command_of_a_site_looks_at_certificate_and_key_before_it_starts(
    tmp_path: Path, made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.yaml").write_text(PLAIN)
    write_sites(tmp_path / "sites", tmp_path / "c.yaml", [])
    site = str(tmp_path / "sites" / "q0" / "site.yaml")
    old = certificates.expired_root(tmp_path / "old")

    def said(*options: object) -> tuple[int, str]:
        status = site_command.main([site, *map(str, options)])
        return status, " ".join(capsys.readouterr().err.split())

    assert said("--certificate", made / "ca.crt", "--key", made / "q0") == (0, "")
    status, text = said("--certificate", old)
    assert status == 2 and "expired on 2020-02-01. Get a new one" in text
    status, text = said("--key", made / "q0.pub")
    assert status == 2 and "not a private key of OpenSSH" in text
    status, text = said("--key", made / "none")
    assert status == 2 and "No such file" in text


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (("ecdsa", "-b", "256", "-N", ""), ""),
        (("ecdsa", "-b", "384", "-N", "a secret"), "protected by a password, which a SuperNode"),
        (("ed25519", "-N", ""), "not an ECDSA key"),
        (("rsa", "-b", "2048", "-N", ""), "not an ECDSA key"),
        (None, "not a private key of OpenSSH"),
    ],
    ids=["ecdsa", "password", "ed25519", "rsa", "cut short"],
)
def test_a_key_that_flower_could_not_sign_with_is_refused_before_the_site_serves(
    tmp_path: Path, made: Path, kind: tuple[str, ...] | None, text: str
) -> None:
    """Flower would end without a reason, and the site's log would speak of clocks."""
    path = tmp_path / "key"
    if kind is None:
        path.write_text((made / "s0").read_text()[:120])
    else:
        run("ssh-keygen", "-q", "-t", *kind, "-f", path)
    if not text:
        supernode.check_files("", str(path))
        return
    with pytest.raises(ConfigError, match=rf"key: {text}.* Make one: ssh-keygen -t ecdsa -b 384"):
        supernode.check_files("", str(path))


def test_a_certificate_that_is_refused_is_not_answered_with_start_the_superlink(
    tmp_path: Path, made: Path
) -> None:
    (tmp_path / "c.yaml").write_text(PLAIN)
    old = certificates.expired_root(tmp_path / "old")
    with listening(made) as address:
        how = ["run.engine=flower", f"run.superlink={address}", f"run.output={tmp_path / 'run'}"]
        outcome = command(tmp_path / "c.yaml", *how, f"run.certificate={old}")
    assert_refused(outcome, "expired on 2020-02-01. Get a new one from the SuperLink's operator")
    assert "flower-superlink" not in outcome.err


# Handshakes ---------------------------------------------------------------------------------------


def test_what_keeps_a_machine_from_a_superlink_is_said_in_words(tmp_path: Path, made: Path) -> None:
    other, host = tmp_path / "other", tmp_path / "host"
    keys.make(other, "127.0.0.1", ["s0"])
    certificates.for_host_alone(host, "link.example.org")
    expired = certificates.with_expired_link(tmp_path / "expired", "s0")

    def trouble(server: Path | None, root: Path | str) -> str:
        with listening(server) as address:
            return tls.probe(address, str(root))

    assert trouble(made, made / "ca.crt") == "" == trouble(None, "")
    assert "speaks TLS. Give its root certificate" in trouble(made, "")
    assert "does not speak TLS" in trouble(None, made / "ca.crt")
    assert f"refused by {other}/ca.crt: " in trouble(made, other / "ca.crt")
    assert "not valid for '127.0.0.1'. Use the address" in trouble(host, host / "ca.crt")
    assert "has expired. Whoever runs the SuperLink must renew" in trouble(
        expired, expired / "ca.crt"
    )
    assert "expired on 2020-02-01" in trouble(made, certificates.expired_root(tmp_path / "old"))
    with listening(None) as address:
        pass
    assert "nobody answers" in tls.probe(address, "")
    assert "nobody answers" in tls.probe(f"{'x' * 64}.org:1", "")


def test_a_certificate_of_ours_is_good_enough_for_a_strict_client(made: Path) -> None:
    run("openssl", "verify", "-x509_strict", "-CAfile", made / "ca.crt", made / "link.crt")


def test_openssh_reads_the_private_key_of_a_site_and_finds_its_public_half(made: Path) -> None:
    assert (
        run("ssh-keygen", "-y", "-f", made / "s0").split()[:2]
        == ((made / "s0.pub").read_text().split()[:2])
    )


# The SuperNode of a site -------------------------------------------------------------------------


@pytest.fixture
def flower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A SuperNode that is refused at once, in Flower's words."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("flwr", "flower-supernode"):
        (folder / name).write_text("#!/bin/sh\necho '[code: 2004] Failed to activate SuperNode.'\n")
        (folder / name).chmod(0o755)
    (folder / "python").symlink_to(shutil.which("python3") or "")
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setattr(supernode, "RESTART_SECONDS", 0.05)
    monkeypatch.setattr(supernode, "PROBE_SECONDS", 0.05)
    return folder


def heard(there: supernode.SuperNode, caplog: pytest.LogCaptureFixture, text: str) -> bool:
    """Whether a text is in the log soon."""
    there.start()
    try:
        end = time.monotonic() + 300
        while time.monotonic() < end and not any(text in line for line in caplog.messages):
            time.sleep(0.02)
        return any(text in line for line in caplog.messages)
    finally:
        there.stop()


@pytest.mark.parametrize(("code", "failed"), [(23, "run"), (22, "supernode")])
def test_keys_are_made_known_to_the_superlink_unless_it_knows_them(
    flower: Path, made: Path, code: int, failed: str
) -> None:
    """23: it knows the key already, and the next command follows; 22: the key is none to it."""
    (flower / "flwr").write_text(
        f'#!/bin/sh\necho "$@" >> {flower}/asked\necho "[code: {code}] said"\nexit 1\n'
    )
    pins = NodeKeys(made, ["q0"])
    with listening(None) as address, pytest.raises(SiteError, match=f"flwr {failed} failed: "):
        FlowerTransport(address, "", pins)
    asked = (flower / "asked").read_text().splitlines()
    assert asked[0] == f"supernode register {made / 'q0.pub'} ours --name q0"
    assert [line.split()[0] for line in asked[1:]] == ["run"] * (failed == "run")


def test_a_supernode_that_is_refused_is_explained_to_the_operator(
    flower: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with listening(None) as address:
        there = supernode.SuperNode(tmp_path / "door", tmp_path / "own", address, "", "")
        assert heard(there, caplog, "ended: the SuperLink does not know the key of this site")


@pytest.mark.parametrize("key", [True, False])
def test_a_supernode_that_signs_and_ends_without_a_reason_says_that_clocks_may_differ(
    flower: Path, tmp_path: Path, made: Path, caplog: pytest.LogCaptureFixture, key: bool
) -> None:
    """Flower ends at a refused signature, and its log has no word of the time."""
    (flower / "flower-supernode").write_text("#!/bin/sh\nexit 0\n")
    root, pair = (str(made / "ca.crt"), str(made / "q0")) if key else ("", "")
    with listening(made if key else None) as address:
        there = supernode.SuperNode(tmp_path / "door", tmp_path / "own", address, root, pair)
        assert heard(there, caplog, "The SuperNode ended: status 0")
    assert ("compare the clocks" in caplog.text) == key


def test_no_supernode_is_started_for_a_superlink_that_cannot_be_spoken_with(
    flower: Path, tmp_path: Path, made: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with listening(made) as address:
        there = supernode.SuperNode(tmp_path / "door", tmp_path / "own", address, "", "")
        assert heard(there, caplog, "No SuperNode yet: the SuperLink at")
    assert there._process is None
    assert sum("No SuperNode yet" in line for line in caplog.messages) <= 2  # said, not repeated


def test_the_keys_of_a_trial_are_what_pins_are_made_of(made: Path) -> None:
    assert set(NodeKeys(made, ["s0", "q0"]).files) == {"s0", "q0"}
    words = (made / "s0.pub").read_text().split()
    assert words[0] == "ecdsa-sha2-nistp384" and base64.b64decode(words[1])
