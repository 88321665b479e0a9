"""Tools of a site: its SuperNode, generated keys for a trial, and the demonstration."""

import contextlib
import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from privssl.errors import ConfigError, UserError
from privssl.remote import flower_transport, framing, tls
from privssl.remote.discovery import SiteError
from privssl.remote.flower_transport import OFFLINE, FlowerTransport, environment
from privssl.site import demo, keys, sandbox, settings, supernode
from privssl.site.supernode import SuperNode
from tests.support import certificates
from tests.support.certificates import listening


@pytest.fixture
def flower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Programs of Flower's names that record their arguments and environment, and wait."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("flwr", "flower-supernode", "flower-superlink"):
        (folder / name).write_text(
            f'#!/bin/sh\nenv > "$FLWR_HOME/env"\necho "$@" >> "$FLWR_HOME/{name}"\n'
            'test "$1" = run && exit 3\nsleep 600\n'
        )
        (folder / name).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    (folder / "python").symlink_to(shutil.which("python3") or "")
    return folder


@pytest.fixture
def link() -> Iterator[str]:
    with listening(None) as address:
        yield address


def becomes_true(true: Callable[[], bool]) -> bool:
    """Wait until a condition is true; whether it became true."""
    end = time.monotonic() + 300
    while not true() and time.monotonic() < end:
        time.sleep(0.02)
    return true()


def start_and_read_arguments(node: Any, folder: Path) -> str:
    """The arguments of a started SuperNode, read once the line is complete."""
    node.start()
    file = folder / "flower-supernode"
    assert becomes_true(lambda: file.exists() and file.read_text().endswith("\n"))
    return file.read_text()


def test_a_supernode_is_started_offline_with_only_the_sites_socket(
    flower: Path, link: str, tmp_path: Path
) -> None:
    own = tmp_path / "own"
    node = SuperNode(tmp_path / "door", own, link, "", "")
    try:
        arguments = start_and_read_arguments(node, own)
        variables = dict(
            line.split("=", 1) for line in (own / "env").read_text().splitlines() if "=" in line
        )
    finally:
        node.stop()
    assert f'--node-config door="{tmp_path / "door"}"' in arguments
    assert "--insecure" in arguments and f"--superlink {link}" in arguments
    assert {name: variables[name] for name in OFFLINE} == OFFLINE
    assert (
        variables["FLWR_HOME"] == variables["TMPDIR"] == str(own) and "PYTHONPATH" not in variables
    )
    assert node._process is not None and node._process.poll() is not None  # it has ended


def test_a_supernode_that_ends_is_restarted(
    flower: Path, link: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supernode, "RESTART_SECONDS", 0.05)
    node = SuperNode(tmp_path / "door", tmp_path / "own", link, "", "")
    try:
        start_and_read_arguments(node, tmp_path / "own")
        assert node._process is not None
        first = node._process
        os.killpg(first.pid, signal.SIGKILL)
        assert becomes_true(lambda: node._process is not first)
    finally:
        node.stop()


def test_a_supernode_that_starts_while_its_site_stops_is_ended(
    flower: Path, link: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = SuperNode(tmp_path / "door", tmp_path / "own", link, "", "")
    start = subprocess.Popen

    def stop_then_start(*command: Any, **how: Any) -> Any:
        node.stop()  # there is no process yet to end
        return start(*command, **how)

    monkeypatch.setattr(subprocess, "Popen", stop_then_start)
    node.start()
    node._thread.join(60)
    assert not node._thread.is_alive()
    assert node._process is not None and node._process.poll() is not None


@pytest.mark.parametrize("blocked", ["supernode.log", "own"])
def test_a_supernode_with_unwritable_files_is_started_once_they_are_writable(
    flower: Path, link: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture, blocked: str,
) -> None:  # fmt: skip
    """Otherwise the site would run without a connection for ever."""
    monkeypatch.setattr(supernode, "RESTART_SECONDS", 0.05)
    if blocked == "own":
        (tmp_path / blocked).write_text("no folder")
    else:
        (tmp_path / blocked).mkdir()
    node = SuperNode(tmp_path / "door", tmp_path / "own", link, "", "")
    node.start()
    try:
        assert becomes_true(lambda: "Check space and rights of" in caplog.text)
        assert node._process is None
        (tmp_path / blocked).rename(tmp_path / "away")
        assert becomes_true(lambda: node._process is not None)
    finally:
        node.stop()


@pytest.mark.parametrize(
    ("address", "certificate", "landlock", "text"),
    [
        ("example.org:http", "", 7, "give host:port"),
        ("example.org:8000", "", 7, "would cross a network in clear"),
        ("example.org:8000", "ca.crt", 0, "no Landlock .* as another user"),
        ("here", "", 7, "give host:port"),
        ("127.0.0.1:65536", "", 7, "the port up to 65535"),
        ("https://example.org:443", "ca.crt", 7, "give host:port"),
        ("example.org:443/", "ca.crt", 7, "give host:port"),
    ],
)
def test_a_supernode_is_refused_without_tls_or_sandbox_for_a_remote_superlink(
    flower: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str, certificate: str,
    landlock: int, text: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(sandbox, "version", lambda: landlock)
    with pytest.raises(ConfigError, match=text):
        SuperNode(tmp_path / "door", tmp_path / "own", address, certificate, "")
    SuperNode(tmp_path / "door", tmp_path / "own", "127.0.0.1:1", "", "")  # the control


@pytest.mark.usefixtures("flower")
def test_a_key_without_a_certificate_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--key needs --certificate"):
        SuperNode(tmp_path / "door", tmp_path / "own", "127.0.0.1:1", "", "s0")
    SuperNode(tmp_path / "door", tmp_path / "own", "127.0.0.1:1", "ca.crt", "s0")  # the control


@pytest.mark.skipif(not sandbox.version(), reason="this kernel has no Landlock")
def test_a_supernode_cannot_read_the_sites_folder(flower: Path, link: str, tmp_path: Path) -> None:
    (tmp_path / "rows").write_text("patient 4711")
    (flower / "flower-supernode").write_text(
        f'#!/bin/sh\ncat {tmp_path / "rows"} > "$FLWR_HOME/stolen" 2> "$FLWR_HOME/error"\n'
        'echo "$@" > "$FLWR_HOME/flower-supernode"\nsleep 600\n'
    )
    own = tmp_path / "own"
    node = SuperNode(tmp_path / "door", own, link, "", "")
    try:
        start_and_read_arguments(node, own)
    finally:
        node.stop()
    assert (own / "stolen").read_text() == ""
    assert "Permission denied" in (own / "error").read_text()


@pytest.mark.skipif(not sandbox.version(), reason="this kernel has no Landlock")
def test_sandboxed_code_cannot_redirect_the_sites_log_to_another_file(
    flower: Path, link: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The site opens the SuperNode's log, with its own rights, each time that it starts one."""
    monkeypatch.setattr(supernode, "RESTART_SECONDS", 0.05)
    target, own = tmp_path / "sitecustomize.py", tmp_path / "own"
    (flower / "flower-supernode").write_text(
        '#!/bin/sh\necho "import os"\ncd "$FLWR_HOME"\n'
        f'for log in *.log supernode.log log; do ln -sf {target} "$log"; done\n'
        'echo once >> started\ntest $(wc -l < started) -ge 3 && echo "$@" > flower-supernode\n'
        "test $(wc -l < started) -ge 3 && sleep 600\n"
    )
    node = SuperNode(tmp_path / "door", own, link, "", "")
    try:
        start_and_read_arguments(node, own)
    finally:
        node.stop()
    assert (own / "supernode.log").is_symlink()  # the control: the attack was attempted
    assert not target.exists()
    assert "import os" in (tmp_path / "supernode.log").read_text()


@pytest.mark.skipif(not sandbox.version(), reason="this kernel has no Landlock")
def test_a_site_whose_rows_the_sandbox_can_read_is_refused(flower: Path, tmp_path: Path) -> None:
    for inside in (Path(sys.prefix) / "rows.npz", tmp_path / "own" / "rows"):
        with pytest.raises(ConfigError, match="which a SuperNode has to read"):
            SuperNode(tmp_path / "door", tmp_path / "own", "127.0.0.1:1", "", "", [inside])
    SuperNode(tmp_path / "door", tmp_path / "own", "127.0.0.1:1", "", "", [tmp_path / "rows"])


def test_the_coordinator_reports_flowers_error_if_the_run_is_refused(
    flower: Path, tmp_path: Path
) -> None:
    (flower / "flwr").write_text("#!/bin/sh\necho 'I would rather not'\nexit 3\n")
    with (
        listening(None) as address,
        pytest.raises(SiteError, match=r"run failed: I would"),
    ):
        FlowerTransport(address, "")
    with pytest.raises(SiteError, match=r"run\.superlink: nobody answers at 127\.0\.0\.1:1"):
        FlowerTransport("127.0.0.1:1", "")
    with pytest.raises(ConfigError, match=r"none: No such file .* Give the root certificate"):
        FlowerTransport("127.0.0.1:1", str(tmp_path / "none"))


@pytest.mark.usefixtures("flower")
@pytest.mark.parametrize("named", [True, False])
def test_the_error_explains_a_superlink_certificate_without_127_0_0_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    certificates.skip_without_cryptography()
    made = tmp_path / "keys"
    if named:
        keys.make(made, "localhost", ["s0"])
    else:
        certificates.for_host_only(made, "localhost")
    monkeypatch.setattr(flower_transport, "START_SECONDS", 0.2)
    monkeypatch.setattr(FlowerTransport, "_run_flwr", lambda *_, **__: "")
    with listening(made) as address:
        by_name = f"localhost:{address.rpartition(':')[2]}"
        assert tls.probe(by_name, str(made / "ca.crt")) == ""
        with pytest.raises(SiteError, match=r"did not start it in 0.2 s\. The SuperLink must") as e:
            FlowerTransport(by_name, str(made / "ca.crt"))
    assert ("needs 127.0.0.1 as a further name" in str(e.value)) == (not named)


@pytest.mark.usefixtures("flower")
def test_a_temporary_folder_where_no_socket_can_be_created_is_reported(
    link: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long_folder = tmp_path / ("x" * 100)  # the path of a socket has at most 107 bytes
    long_folder.mkdir()
    text = "cannot be made here: .*Set TMPDIR to a short path with free space"
    for folder in (long_folder, tmp_path / "none"):
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        with pytest.raises(SiteError, match=text):
            FlowerTransport(link, "")
    assert list(long_folder.iterdir()) == []


@pytest.mark.usefixtures("flower")
def test_after_ctrl_c_a_late_reply_is_not_taken_for_the_next_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Ctrl-C arrives while a visit is pending; then the run sends its end to the site."""

    def deliver(counter: socket.socket) -> None:
        with counter, contextlib.suppress(OSError):
            while True:
                framing.receive(counter)  # the order
                frame = framing.receive(counter)
                framing.send(counter, b'["7"]')
                framing.send(counter, b"answer to " + frame)

    def connect(transport: FlowerTransport) -> socket.socket:
        transport._relay, far = socket.socketpair()
        threading.Thread(target=deliver, args=(far,), daemon=True).start()
        return transport._relay

    def raise_interrupt(_: socket.socket) -> bytes:
        raise KeyboardInterrupt

    monkeypatch.setattr(FlowerTransport, "_write_app", lambda *_: None)
    monkeypatch.setattr(FlowerTransport, "_connect", connect)
    with contextlib.closing(FlowerTransport("127.0.0.1:1", "")) as transport:
        with monkeypatch.context() as now, pytest.raises(KeyboardInterrupt):
            now.setattr(flower_transport, "receive", raise_interrupt)
            transport.exchange({"7": b"a visit"}, 60.0)
        assert transport.exchange({"7": b"farewell"}, 60.0) == {"7": b"answer to farewell"}
    assert "is lost" not in caplog.text


def test_flower_gets_its_own_folder_and_no_secrets_of_our_environment(
    flower: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_SECRET_ACCESS_KEY", "SSH_AUTH_SOCK", "DATABASE_URL", "PYTHONPATH"):
        monkeypatch.setenv(name, "ours")
    for name in ("https_proxy", "LC_ALL", "SSL_CERT_FILE", "GRPC_VERBOSITY"):
        monkeypatch.setenv(name, "needed")
    variables = environment(tmp_path)
    assert "ours" not in variables.values() and list(variables.values()).count("needed") == 4
    assert variables["FLWR_HOME"] == str(tmp_path) and variables["PATH"].startswith(str(flower))
    assert flower_transport.program("flwr") == str(flower / "flwr")


# Keys -----------------------------------------------------------------------------------------


@pytest.mark.skipif(not shutil.which("openssl"), reason="openssl is not installed")
def test_generated_keys_and_certificates_match_and_are_private_to_their_owner(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("cryptography")
    folder = tmp_path / "keys"
    assert keys.main([str(folder), "s0", "q0", "--host", "link.example.org"]) == 0
    assert {path.name for path in folder.iterdir()} == {
        "ca.crt", "link.crt", "link.key", "s0", "s0.pub", "q0", "q0.pub",
    }  # fmt: skip
    ca, link = folder / "ca.crt", folder / "link.crt"

    def is_verified(host: str, by: str = "-verify_hostname") -> bool:
        asked = ["openssl", "verify", "-CAfile", str(ca), by, host, str(link)]
        return subprocess.run(asked, capture_output=True, check=False).returncode == 0

    assert is_verified("link.example.org") and not is_verified("other.example.org")
    # A SuperLink on 0.0.0.0 starts processes that connect to it at this address.
    assert is_verified("127.0.0.1", "-verify_ip") and not is_verified("127.0.0.2", "-verify_ip")
    assert {path.stat().st_mode & 0o077 for path in folder.iterdir() if path.suffix != ".pub"} == {
        0
    }
    assert "ecdsa-sha2-nistp384" in (folder / "s0.pub").read_text()
    assert keys.main([str(folder), "s0"]) == 2
    assert "Give a new folder" in capsys.readouterr().err
    assert keys.main([str(tmp_path / "k"), "../s0"]) == 2


# The demonstration ------------------------------------------------------------------------------


def test_the_demonstration_writes_a_site_per_agent_and_none_for_a_labelled_server(
    tmp_path: Path,
) -> None:
    (tmp_path / "c.yaml").write_text(
        "data: {name: toy, labelled: 24, labels: labels-at-server}\nagents: {query: 2}\n"
        "model: {width: 4}\nalgorithm: {name: fedssl, rounds: 2, generator_width: 4, warm_up: 1}\n"
    )
    assert demo.write_sites(tmp_path / "a", tmp_path / "c.yaml", []) == ["q0", "q1"]
    record_at_exit = settings.load_site_config(tmp_path / "a" / "q1" / "site.yaml")
    assert (record_at_exit.site.agent, record_at_exit.site.role, record_at_exit.budget) == (
        "q1",
        "query",
        None,
    )
    with pytest.raises(UserError, match="Give a new folder"):
        demo.write_sites(tmp_path / "a", tmp_path / "c.yaml", [])


def test_a_demonstration_on_a_full_disk_ends_with_an_error_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def raise_disk_full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "a"))

    monkeypatch.setattr(demo, "demonstrate", raise_disk_full)
    assert demo.main([str(tmp_path / "a")]) == 2
    assert f"{tmp_path / 'a'}: No space left on device. Free space" in capsys.readouterr().err
    pytest.importorskip("cryptography")
    monkeypatch.setattr(Path, "write_bytes", raise_disk_full)
    assert keys.main([str(tmp_path / "keys"), "s0"]) == 2
    assert "keys: cannot be written: No space left" in capsys.readouterr().err


@pytest.mark.slow
def test_arguments_override_the_small_defaults_of_the_demonstration(tmp_path: Path) -> None:
    names = demo.write_sites(tmp_path / "a", None, ["agents.query=4"])
    assert names == ["s0", "s1", "q0", "q1", "q2", "q3"]
    written = yaml.safe_load((tmp_path / "a" / "experiment.yaml").read_text())
    assert written["algorithm"]["rounds"] == 4
    assert settings.load_site_config(
        tmp_path / "a" / "s0" / "site.yaml"
    ).budget == settings.BudgetSettings(epsilon=8.0, delta=1e-5)


def test_without_flower_the_demonstration_creates_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert demo.main([str(tmp_path / "a")]) == 2
    assert "is not installed. Install Flower: pip install" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()


SLOW_TO_STOP = """\
import signal, sys, time
def stop(*_):
    time.sleep(0.5)
    open(sys.argv[1], "w").write("a checkpoint")
    sys.exit(130)
signal.signal(signal.SIGINT, stop)
open(sys.argv[1] + ".begun", "w").close()
time.sleep(600)
"""


@pytest.mark.fast_cases(1)
@pytest.mark.usefixtures("default_sighup")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_demonstration_ends_its_sites_only_after_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """The training command needs the sites for their ledgers, and no process may remain."""
    checkpoint, checkpoint_at_exit = tmp_path / "checkpoint", []

    @contextlib.contextmanager
    def record_at_exit() -> Iterator[None]:
        try:
            yield
        finally:
            checkpoint_at_exit.append(checkpoint.exists())

    def demonstrate(*_: object) -> int:
        with record_at_exit():
            command = [sys.executable, "-c", SLOW_TO_STOP, str(checkpoint)]
            process = subprocess.Popen(command, start_new_session=True)
            demo.wait_until(checkpoint.with_suffix(".begun").exists, process, checkpoint)
            waits = process.wait

            def stopped_while_it_waits() -> int:
                monkeypatch.setattr(process, "wait", waits)
                signal.raise_signal(number)
                return waits()

            monkeypatch.setattr(process, "wait", stopped_while_it_waits)
            return demo.end_of(process)

    monkeypatch.setattr(demo, "demonstrate", demonstrate)
    assert demo.main([str(tmp_path / "a")]) == 130
    assert checkpoint_at_exit == [True]
