"""The coordinator's side of the Flower transport.

    coordinator --- Unix socket --- remote/flower_app.py (ServerApp) --- SuperLink --- SuperNodes

``flwr run`` submits ``remote/flower_app.py`` to a SuperLink on this machine, which starts it as the
relay; the relay connects to the coordinator's socket. flwr is never imported here, so the run
remains an ordinary command with checkpoints and Ctrl-C. If the relay ends, the next message starts
another one. If this process ends, the relay's socket closes and it ends too.
"""

import json
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from privssl.remote import tls
from privssl.remote.discovery import SiteError
from privssl.remote.framing import receive, send
from privssl.remote.node_keys import NodeKeys
from privssl.settings.addresses import LOOPBACK

PARALLEL_REGISTRATIONS = 4  # processes of Flower at once
ALREADY_REGISTERED = "[code: 23]"  # Flower's answer to a known key
START_SECONDS = 90.0  # for flwr run, and for the relay to connect
GRACE_SECONDS = 10.0  # for the relay's answer, beyond the limit of the request
#: Disables all network access of flwr that a run does not need.
OFFLINE = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
#: Environment variables that Flower's processes inherit. PYTHONPATH is for our interpreter only.
_INHERITED = re.compile(
    r"HOME|LANG|LC_[A-Z]+|TZ|TMPDIR|LD_LIBRARY_PATH|DYLD_[A-Z_]+|SSL_CERT_(FILE|DIR)|(GRPC|FLWR)_\w+"
    r"|(?i:(http|https|all|no)_proxy)|SYSTEMROOT"
)
_APP = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "privssl-relay"
version = "0.1.0"
description = "Relays messages between a coordinator and sites of privssl"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "privssl"

[tool.flwr.app.components]
serverapp = "relay:server"
clientapp = "relay:client"

[tool.flwr.app.config]
coordinator = ""
"""

T = TypeVar("T")

log = logging.getLogger("privssl")


def program(name: str) -> str:
    """Return the path of one of Flower's programs. Raises SiteError if Flower is not installed."""
    candidate = Path(sys.executable).parent / name
    path = str(candidate) if candidate.exists() else shutil.which(name)
    if path is None:
        raise SiteError(f"{name} is not installed. Install Flower: pip install 'privssl[flower]'")
    return path


def environment(home: Path) -> dict[str, str]:
    """Return the environment of a Flower process: offline, with its files under ``home``.

    Only required variables are inherited: environments contain keys and passwords, and a SuperLink
    ships code that runs in it.
    """
    inherited = {name: value for name, value in os.environ.items() if _INHERITED.fullmatch(name)}
    path = f"{Path(program('flwr')).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**inherited, **OFFLINE, "FLWR_HOME": str(home), "PATH": path}


def free_port() -> int:
    """Return a TCP port on loopback that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def _convert_os_errors(folder: Path | None = None) -> Iterator[None]:
    """Convert OSError to SiteError. ``folder``: None before it is created."""
    try:
        yield
    except OSError as error:
        raise SiteError(
            f"{folder or 'Temporary folder'}: Flower's files and a socket cannot be made here: "
            f"{error.strerror or error}. Set TMPDIR to a short path with free space"
        ) from None


class FlowerTransport:
    """Exchanges messages over Flower. Addresses are Flower's node ids."""

    def __init__(self, superlink: str, certificate: str, node_keys: NodeKeys | None = None) -> None:
        """Start the relay to a SuperLink (host:port).

        Args:
            certificate: file of the root certificate; empty on loopback.
            node_keys: keys of sites to register at the SuperLink; None: no keys.

        Raises:
            SiteError: Flower is not installed, or its SuperLink does not answer.
            privssl.errors.ConfigError: the certificate is invalid or has expired.
        """
        program("flwr")
        self._certificate = str(Path(certificate).expanduser().resolve()) if certificate else ""
        if certificate and (warning := tls.check_root(Path(self._certificate))):
            log.warning("%s", warning)
        self._superlink, self._node_keys = superlink, node_keys
        self._keys: dict[str, str] = {}  # address -> public key
        self._relay: socket.socket | None = None
        self._listener: socket.socket | None = None
        with _convert_os_errors():
            self._folder = Path(tempfile.mkdtemp(prefix="privssl-"))
        try:
            with _convert_os_errors(self._folder):
                self._write_app()
                self._listener = socket.socket(socket.AF_UNIX)
                self._listener.bind(str(self._folder / "coordinator"))
                self._listener.listen(1)
            self._connect()
        except BaseException:
            self.close()
            raise

    def addresses(self) -> Sequence[str]:
        def fetch_addresses(relay: socket.socket) -> Sequence[str]:
            relay.settimeout(GRACE_SECONDS)
            send(relay, json.dumps({"do": "addresses"}).encode())
            self._keys = dict(json.loads(receive(relay)))
            return list(self._keys)

        return self._call_relay(fetch_addresses, [])

    def key_owner(self, address: str) -> str:
        """Return the agent with the key of the node at an address; empty if there is none."""
        assert self._node_keys is not None
        return self._node_keys.owner(self._keys.get(address, ""))

    def exchange(self, frames: Mapping[str, bytes], seconds: float) -> Mapping[str, bytes]:
        def exchange_frames(relay: socket.socket) -> Mapping[str, bytes]:
            relay.settimeout(seconds + GRACE_SECONDS)
            request = {"do": "exchange", "to": list(frames), "seconds": seconds}
            for part in (json.dumps(request).encode(), *frames.values()):
                send(relay, part)
            return {str(address): receive(relay) for address in json.loads(receive(relay))}

        return self._call_relay(exchange_frames, {}) if frames else {}

    def close(self) -> None:
        for connection in (self._relay, self._listener):
            if connection is not None:
                connection.close()
        self._relay = self._listener = None
        shutil.rmtree(self._folder, ignore_errors=True)

    # The relay ------------------------------------------------------------------------------

    def _call_relay(self, request: Callable[[socket.socket], T], default: T) -> T:
        """Return the result of ``request``, or ``default`` if the relay fails.

        Any interruption drops the relay, because its late answer could be mistaken for the next
        one.
        """
        try:
            if self._listener is None:
                raise OSError("closed")
            return request(self._relay or self._connect())
        except BaseException as error:
            if isinstance(error, Exception):  # Ctrl-C is not an error of the run
                log.warning("The Flower run ended (%s). The next message starts another one", error)
            with suppress(OSError):
                if self._relay is not None:
                    self._relay.close()
            self._relay = None
            if isinstance(error, OSError | SiteError | ValueError):
                return default
            raise

    def _write_app(self) -> None:
        """Write the Flower app, and Flower's config with the SuperLink's address."""
        app, home = self._folder / "app", self._folder / "flwr"
        app.mkdir()
        home.mkdir()
        (app / "pyproject.toml").write_text(_APP)
        shutil.copy(Path(__file__).with_name("framing.py"), app)  # without the package
        relay = Path(__file__).with_name("flower_app.py").read_text()
        (app / "relay.py").write_text(relay.replace("privssl.remote.framing", "framing"))
        lines = ["[superlink]", 'default = "ours"', "[superlink.ours]"]
        lines.append(f'address = "{self._superlink}"')
        if self._certificate:
            lines.append(f"root-certificates = {json.dumps(self._certificate)}")
        elif self._superlink.rpartition(":")[0] in LOOPBACK:
            lines.append("insecure = true")
        (home / "config.toml").write_text("\n".join(lines) + "\n")

    def _connect(self) -> socket.socket:
        assert self._listener is not None
        if problem := tls.probe(self._superlink, self._certificate):
            raise SiteError(f"run.superlink: {problem}")
        self._register_keys()
        address = json.dumps(str(self._folder / "coordinator"))
        config = ("--run-config", f"coordinator={address}")
        self._run_flwr("run", str(self._folder / "app"), "ours", *config)
        self._listener.settimeout(START_SECONDS)
        try:
            self._relay, _ = self._listener.accept()
        except TimeoutError:
            raise SiteError(
                f"Flower accepted a run and did not start it in {START_SECONDS:g} s. "
                f"{self._explain_no_start()}"
            ) from None
        return self._relay

    def _explain_no_start(self) -> str:
        """Return a hint if the relay may have failed to start because of the certificate.

        A SuperLink on 0.0.0.0 starts processes that connect to 127.0.0.1. They retry for ever if
        its certificate does not name that address.
        """
        address = f"127.0.0.1:{self._superlink.rpartition(':')[2]}"
        if self._certificate and (problem := tls.probe(address, self._certificate)):
            return (
                f"The SuperLink must run on this machine. Its own processes connect to {address}, "
                f"but {problem}. Its certificate needs 127.0.0.1 as a further name"
            )
        return "The SuperLink must run on this machine; look at its log"

    def _register_keys(self) -> None:
        """Register the sites' keys; a restarted SuperLink has lost them."""
        files = {} if self._node_keys is None else self._node_keys.files

        def register(name: str) -> str:
            command = ("supernode", "register", str(files[name]), "ours", "--name", name)
            return self._run_flwr(*command, tolerated=ALREADY_REGISTERED)

        with ThreadPoolExecutor(PARALLEL_REGISTRATIONS) as pool:
            for output in pool.map(register, files):
                log.debug("%s", output)

    def _run_flwr(self, *arguments: str, tolerated: str = "") -> str:
        """Run Flower's command and return its output. ``tolerated``: ignore a failure whose output
        contains this text. Raises SiteError if it fails or takes too long."""
        try:
            result = subprocess.run(
                [program("flwr"), *arguments], env=environment(self._folder / "flwr"),
                capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=START_SECONDS,
                check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise SiteError(
                f"flwr {arguments[0]} did not end within {START_SECONDS:g} s. Look at the "
                "SuperLink's log"
            ) from None
        output = f"{result.stdout}\n{result.stderr}".strip()
        if result.returncode and not (tolerated and tolerated in output):
            tail = " ".join(output.replace("│", " ").split())[-300:]
            raise SiteError(f"flwr {arguments[0]} failed: {tail}. Look at the SuperLink's log")
        return output
