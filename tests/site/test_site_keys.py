"""Keys and certificates of sites, without Flower: pinned keys, root certificates and handshakes.

test_flower_tls.py does the same with a SuperLink and SuperNodes.
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
from tests.support.sites_engine import site_named

certificates.skip_without_cryptography()
DAY = 86400.0


@pytest.fixture(scope="module")
def key_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys") / "keys"
    keys.make(folder, "127.0.0.1", ["s0", "q0"])
    return folder


# Pinned keys ------------------------------------------------------------------------------------


def pem(path: Path) -> str:
    """A public key in Flower's format (SubjectPublicKeyInfo), converted by ssh-keygen."""
    return run_program("ssh-keygen", "-e", "-m", "PKCS8", "-f", path)


def run_program(program: str, *arguments: object) -> str:
    """Run a program and return its output; skip the test if it is not installed."""
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    call = [program, *map(str, arguments)]
    return subprocess.run(call, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("bits", [256, 384, 521])
def test_a_public_key_of_openssh_is_recognised_in_flowers_format_on_every_curve(
    tmp_path: Path, bits: int
) -> None:
    kind = ("-q", "-t", "ecdsa", "-b", bits, "-N", "", "-C", "s0")
    run_program("ssh-keygen", *kind, "-f", tmp_path / "s0")
    pins = NodeKeys(tmp_path, ["s0"])
    assert pins.owner(pem(tmp_path / "s0.pub")) == "s0"


def test_a_key_belongs_to_the_agent_named_by_its_file_and_other_keys_to_no_agent(
    key_folder: Path,
) -> None:
    pins = NodeKeys(key_folder, ["s0", "q0"])
    assert [pins.owner(pem(key_folder / f"{name}.pub")) for name in ("s0", "q0")] == ["s0", "q0"]
    assert NodeKeys(key_folder, ["s0"]).owner(pem(key_folder / "q0.pub")) == ""
    both = pem(key_folder / "q0.pub") + pem(
        key_folder / "s0.pub"
    )  # a SuperLink reads only the first key
    for text in ("", "none", pem(key_folder / "s0.pub")[:-5], both):
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


def test_two_agents_with_one_key_are_refused(key_folder: Path, tmp_path: Path) -> None:
    for name in ("q0", "s0"):
        shutil.copy(key_folder / "q0.pub", tmp_path / f"{name}.pub")
    with pytest.raises(ConfigError, match=r"s0\.pub: also the key of q0"):
        NodeKeys(tmp_path, ["q0", "s0"])


# Identity by key ----------------------------------------------------------------------------------

KEY_OWNERS = {"x": "q0", "y": "q1", "z": ""}


def engine_over(
    handlers: dict[str, Callable[[bytes], bytes]], *names: str, pinned: bool = True
) -> tuple[SitesEngine, transports.InProcessTransport]:
    transport = transports.InProcessTransport(handlers)
    engine = SitesEngine(
        transport, [AgentRef(name, "query") for name in names], algorithm=STEPS,
        agreement=transports.AGREEMENT, home=LocalEngine([], seed=0, device=transports.CPU),
        timeouts=transports.SHORT_TIMEOUTS,
        key_owner=KEY_OWNERS.__getitem__ if pinned else None,
    )  # fmt: skip
    return engine, transport


def test_a_site_that_uses_the_name_of_an_absent_agent_is_refused_by_its_key(
    caplog: pytest.LogCaptureFixture,
) -> None:
    text = r"A site with the key of q1 says that it is q0, and gets no requests"
    with pytest.raises(SiteError, match=rf"1 of 1 sites are not there .*: q0\. {text}"):
        engine_over({"y": site_named("q0")}, "q0")
    assert sum("with the key of q1 says" in line for line in caplog.messages) == 1
    engine, _ = engine_over(
        {"y": site_named("q0")}, "q0", pinned=False
    )  # the control: without pinned keys it is accepted
    assert engine._sites.address == {"q0": "y"}


def test_with_pinned_keys_an_impostor_neither_stops_the_run_nor_is_visited() -> None:
    engine, transport = engine_over(
        {"x": site_named("q0"), "y": site_named("q0"), "z": site_named("q0")}, "q0"
    )
    assert engine._sites.address == {"q0": "x"}
    assert "z" not in [address for address, _ in transport.sent], (
        "no request goes to a key of no agent"
    )
    with pytest.raises(SiteError, match="Two sites call themselves q0"):  # the control
        engine_over({"x": site_named("q0"), "y": site_named("q0")}, "q0", pinned=False)


def test_a_site_that_corrects_its_name_is_accepted() -> None:
    requests: list[bytes] = []

    def name_corrected(frame: bytes) -> bytes:
        requests.append(frame)
        return site_named("q0" if len(requests) == 1 else "q1")(frame)

    engine, _ = engine_over({"y": name_corrected}, "q1")
    assert engine._sites.address == {"q1": "y"} and len(requests) == 2
    assert all(protocol.from_bytes(frame, IdentifyRequest) for frame in requests)


def test_the_error_names_an_incompatible_site_by_its_key() -> None:
    def report_version(_: bytes) -> bytes:
        return protocol.to_bytes(StepResponse("", error="version"))

    with pytest.raises(SiteError, match=r"part \(with the key of q1\) cannot: it has another ver"):
        engine_over({"y": report_version}, "q1")


def test_a_run_with_tls_and_without_pinned_keys_warns_once(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(PLAIN)

    def count_warnings(*more: str) -> int:
        config = configs.load_config(tmp_path / "c.yaml", ["run.engine=flower", *more])
        return sum("names are pinned to no keys" in text for text in config.warnings)

    assert count_warnings("run.certificate=ca.crt") == 1
    assert count_warnings("run.certificate=ca.crt", "run.keys=keys") == 0
    assert count_warnings() == 0  # a trial on loopback


def test_a_missing_key_file_stops_the_run_before_flower_is_called(
    tmp_path: Path, key_folder: Path
) -> None:
    (tmp_path / "c.yaml").write_text(PLAIN)
    outcome = command(
        tmp_path / "c.yaml",
        f"run.output={tmp_path / 'run_program'}",
        "run.engine=flower",
        f"run.keys={key_folder}",
    )
    assert_refused(outcome, "s1.pub: No such file", "run.keys needs the public key of each site")


# Root certificates --------------------------------------------------------------------------------


def test_a_root_certificate_is_checked_for_its_dates_and_warned_of_before_expiry(
    key_folder: Path,
) -> None:
    now = time.time()
    assert tls.check_root(key_folder / "ca.crt") == ""
    assert tls.check_root(key_folder / "ca.crt", now + 75 * DAY) == ""
    assert "expires on" in tls.check_root(key_folder / "ca.crt", now + 77 * DAY)
    with pytest.raises(ConfigError, match=r"expired on .* Get a new one"):
        tls.check_root(key_folder / "ca.crt", now + 91 * DAY)
    with pytest.raises(ConfigError, match=r"not valid before .* clock of this machine"):
        tls.check_root(key_folder / "ca.crt", now - DAY)


@pytest.mark.parametrize(
    ("name", "text"),
    [("link.crt", "a server's certificate"), ("s0.pub", "not a certificate"),
     ("none.crt", "No such file")],
)  # fmt: skip
def test_a_file_that_is_no_root_certificate_is_refused(
    key_folder: Path, name: str, text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        tls.check_root(key_folder / name)


def test_the_site_command_checks_certificate_and_key_before_it_starts(
    tmp_path: Path, key_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.yaml").write_text(PLAIN)
    write_sites(tmp_path / "sites", tmp_path / "c.yaml", [])
    site = str(tmp_path / "sites" / "q0" / "site.yaml")
    expired = certificates.expired_root(tmp_path / "old")

    def run_site_command(*options: object) -> tuple[int, str]:
        status = site_command.main([site, *map(str, options)])
        return status, " ".join(capsys.readouterr().err.split())

    assert run_site_command("--certificate", key_folder / "ca.crt", "--key", key_folder / "q0") == (
        0,
        "",
    )
    status, text = run_site_command("--certificate", expired)
    assert status == 2 and "expired on 2020-02-01. Get a new one" in text
    status, text = run_site_command("--key", key_folder / "q0.pub")
    assert status == 2 and "not a private key of OpenSSH" in text
    status, text = run_site_command("--key", key_folder / "none")
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
def test_a_key_that_flower_cannot_sign_with_is_refused_before_the_site_serves(
    tmp_path: Path, key_folder: Path, kind: tuple[str, ...] | None, text: str
) -> None:
    """Flower would end without a reason, and the site would blame the clocks."""
    path = tmp_path / "key"
    if kind is None:
        path.write_text((key_folder / "s0").read_text()[:120])
    else:
        run_program("ssh-keygen", "-q", "-t", *kind, "-f", path)
    if not text:
        supernode.check_files("", str(path))
        return
    with pytest.raises(ConfigError, match=rf"key: {text}.* Make one: ssh-keygen -t ecdsa -b 384"):
        supernode.check_files("", str(path))


def test_the_error_about_an_expired_certificate_does_not_advise_to_start_the_superlink(
    tmp_path: Path, key_folder: Path
) -> None:
    (tmp_path / "c.yaml").write_text(PLAIN)
    expired = certificates.expired_root(tmp_path / "old")
    with listening(key_folder) as address:
        how = [
            "run.engine=flower",
            f"run.superlink={address}",
            f"run.output={tmp_path / 'run_program'}",
        ]
        outcome = command(tmp_path / "c.yaml", *how, f"run.certificate={expired}")
    assert_refused(outcome, "expired on 2020-02-01. Get a new one from the SuperLink's operator")
    assert "flower-superlink" not in outcome.err


# Handshakes ---------------------------------------------------------------------------------------


def test_each_reason_why_a_superlink_is_unreachable_has_its_own_error(
    tmp_path: Path, key_folder: Path
) -> None:
    other, host = tmp_path / "other", tmp_path / "host"
    keys.make(other, "127.0.0.1", ["s0"])
    certificates.for_host_only(host, "link.example.org")
    expired = certificates.with_expired_link(tmp_path / "expired", "s0")

    def probe_error(server: Path | None, root: Path | str) -> str:
        with listening(server) as address:
            return tls.probe(address, str(root))

    assert probe_error(key_folder, key_folder / "ca.crt") == "" == probe_error(None, "")
    assert "speaks TLS. Give its root certificate" in probe_error(key_folder, "")
    assert "does not speak TLS" in probe_error(None, key_folder / "ca.crt")
    assert f"refused by {other}/ca.crt: " in probe_error(key_folder, other / "ca.crt")
    assert "not valid for '127.0.0.1'. Use the address" in probe_error(host, host / "ca.crt")
    assert "has expired. Whoever runs the SuperLink must renew" in probe_error(
        expired, expired / "ca.crt"
    )
    assert "expired on 2020-02-01" in probe_error(
        key_folder, certificates.expired_root(tmp_path / "old")
    )
    with listening(None) as address:
        pass
    assert "nobody answers" in tls.probe(address, "")
    assert "nobody answers" in tls.probe(f"{'x' * 64}.org:1", "")


def test_our_certificates_pass_strict_x509_verification(key_folder: Path) -> None:
    run_program(
        "openssl",
        "verify",
        "-x509_strict",
        "-CAfile",
        key_folder / "ca.crt",
        key_folder / "link.crt",
    )


def test_openssh_derives_the_public_key_from_a_sites_private_key(key_folder: Path) -> None:
    assert (
        run_program("ssh-keygen", "-y", "-f", key_folder / "s0").split()[:2]
        == ((key_folder / "s0.pub").read_text().split()[:2])
    )


# The SuperNode of a site -------------------------------------------------------------------------


@pytest.fixture
def flower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Programs of Flower's names that report a refused SuperNode and end."""
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


def log_contains(engine: supernode.SuperNode, caplog: pytest.LogCaptureFixture, text: str) -> bool:
    """Start a SuperNode and wait until the log contains a text; whether it does."""
    engine.start()
    try:
        end = time.monotonic() + 300
        while time.monotonic() < end and not any(text in line for line in caplog.messages):
            time.sleep(0.02)
        return any(text in line for line in caplog.messages)
    finally:
        engine.stop()


@pytest.mark.parametrize(("code", "failed"), [(23, "run"), (22, "supernode")])
def test_the_transport_registers_keys_that_the_superlink_does_not_know(
    flower: Path, key_folder: Path, code: int, failed: str
) -> None:
    """23: the key is registered already, and the next command follows. 22: the key is invalid."""
    (flower / "flwr").write_text(
        f'#!/bin/sh\necho "$@" >> {flower}/asked\necho "[code: {code}] said"\nexit 1\n'
    )
    pins = NodeKeys(key_folder, ["q0"])
    with listening(None) as address, pytest.raises(SiteError, match=f"flwr {failed} failed: "):
        FlowerTransport(address, "", pins)
    calls = (flower / "asked").read_text().splitlines()
    assert calls[0] == f"supernode register {key_folder / 'q0.pub'} ours --name q0"
    assert [line.split()[0] for line in calls[1:]] == ["run"] * (failed == "run")


def test_a_site_logs_that_the_superlink_does_not_know_its_key(
    flower: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with listening(None) as address:
        engine = supernode.SuperNode(tmp_path / "door", tmp_path / "own", address, "", "")
        assert log_contains(
            engine, caplog, "ended: the SuperLink does not know the key of this site"
        )


@pytest.mark.parametrize("key", [True, False])
def test_a_site_advises_to_compare_clocks_if_its_supernode_with_a_key_ends_silently(
    flower: Path, tmp_path: Path, key_folder: Path, caplog: pytest.LogCaptureFixture, key: bool
) -> None:
    """Flower ends at a refused signature, and its log does not mention the time."""
    (flower / "flower-supernode").write_text("#!/bin/sh\nexit 0\n")
    root, pair = (str(key_folder / "ca.crt"), str(key_folder / "q0")) if key else ("", "")
    with listening(key_folder if key else None) as address:
        engine = supernode.SuperNode(tmp_path / "door", tmp_path / "own", address, root, pair)
        assert log_contains(engine, caplog, "The SuperNode ended: status 0")
    assert ("compare the clocks" in caplog.text) == key


def test_no_supernode_is_started_for_an_unusable_superlink(
    flower: Path, tmp_path: Path, key_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with listening(key_folder) as address:
        engine = supernode.SuperNode(tmp_path / "door", tmp_path / "own", address, "", "")
        assert log_contains(engine, caplog, "No SuperNode yet: the SuperLink at")
    assert engine._process is None
    assert (
        sum("No SuperNode yet" in line for line in caplog.messages) <= 2
    )  # logged, but not repeatedly


def test_generated_keys_can_be_used_as_pinned_keys(key_folder: Path) -> None:
    assert set(NodeKeys(key_folder, ["s0", "q0"]).files) == {"s0", "q0"}
    fields = (key_folder / "s0.pub").read_text().split()
    assert fields[0] == "ecdsa-sha2-nistp384" and base64.b64decode(fields[1])
