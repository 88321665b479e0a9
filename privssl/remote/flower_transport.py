"""Letters over Flower, from the coordinator's side: a socket, and a process of Flower behind it.

    this process --- Unix socket --- remote/flower_app.py as ServerApp --- SuperLink --- SuperNodes
    --- sites

flwr is never imported here. Its command ``flwr run`` hands ``remote/flower_app.py`` to a SuperLink
on this machine, which starts it; it connects to the socket and carries letters from then on. So the
run itself stays an ordinary command with a terminal, checkpoints and Ctrl-C, and what happens to
Flower's run does not end it: where the carrier is gone, another one is started for the next
letter. When this process ends, however it does, the carrier sees the socket close and ends too.
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
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from privssl.remote import tls
from privssl.remote.discovery import SiteError
from privssl.remote.framing import receive, send
from privssl.remote.node_keys import NodeKeys
from privssl.settings.schema import LOOPBACK

REGISTER_AT_ONCE = 4  # programs of Flower side by side
REGISTERED = "[code: 23]"  # what Flower says of a key that it knows already
START_SECONDS = 90.0  # for flwr run, and for the carrier to come to the socket
GRACE = 10.0  # seconds beyond its limit in which an answer of the carrier itself must come
#: Of all that flwr does over a network, only what we ask for.
OFFLINE = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
#: Variables that Flower's processes get from ours. Not PYTHONPATH: what was told to Python for us
#: is none of their business, and they start programs that lie beside their own.
_NEEDED = re.compile(
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
description = "Carries letters between a coordinator and sites of privssl"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "privssl"

[tool.flwr.app.components]
serverapp = "relay:server"
clientapp = "relay:client"

[tool.flwr.app.config]
counter = ""
"""

log = logging.getLogger("privssl")


def program(name: str) -> str:
    """The path of one of Flower's programs. Raises SiteError where Flower is not installed."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise SiteError(f"{name} is not installed. Install Flower: pip install 'privssl[flower]'")
    return found


def environment(home: Path) -> dict[str, str]:
    """For a process of Flower: switched off what would leave this machine, files under ``home``.

    Of our own environment it gets what a program needs to start and to reach a network: code that
    a server ships runs with it, and environments have keys and passwords in them.
    """
    needed = {name: value for name, value in os.environ.items() if _NEEDED.fullmatch(name)}
    path = f"{Path(program('flwr')).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**needed, **OFFLINE, "FLWR_HOME": str(home), "PATH": path}


class FlowerTransport:
    """Addresses are the numbers that Flower gives to nodes."""

    def __init__(self, superlink: str, certificate: str, pins: NodeKeys | None = None) -> None:
        """Start the carrier.

        Args:
            superlink: host:port.
            certificate: file of the root certificate; empty on loopback.
            pins: keys of sites, which are made known to the SuperLink; None: it knows them.

        Raises:
            SiteError: Flower is not installed, or its SuperLink is not there.
            privssl.errors.ConfigError: the certificate is none, or has expired.
        """
        program("flwr")
        if certificate and (warning := tls.check_root(Path(certificate).expanduser())):
            log.warning("%s", warning)
        self._superlink, self._certificate, self._pins = superlink, certificate, pins
        self._keys: dict[str, str] = {}
        self._folder = Path(tempfile.mkdtemp(prefix="privssl-"))
        self._carrier: socket.socket | None = None
        self._counter: socket.socket | None = None
        try:
            self._write_app()
            self._counter = socket.socket(socket.AF_UNIX)
            self._counter.bind(str(self._folder / "counter"))
            self._counter.listen(1)
            self._connect()
        except BaseException:
            self.close()
            raise

    def addresses(self) -> Sequence[str]:
        try:
            carrier = self._connected()
            send(carrier, json.dumps({"do": "addresses"}).encode())
            carrier.settimeout(GRACE)
            self._keys = dict(json.loads(receive(carrier)))
            return list(self._keys)
        except (OSError, SiteError, ValueError) as error:
            self._lose(error)
            return []
        except BaseException as stopped:  # Ctrl-C: an answer is on its way that nobody waits for
            self._lose(stopped)
            raise

    def key_owner(self, address: str) -> str:
        """The agent whose pinned key the node at an address has; empty: nobody's."""
        assert self._pins is not None
        return self._pins.owner(self._keys.get(address, ""))

    def exchange(self, frames: Mapping[str, bytes], seconds: float) -> Mapping[str, bytes]:
        if not frames:
            return {}
        order = {"do": "exchange", "to": list(frames), "seconds": seconds}
        try:
            carrier = self._connected()
            carrier.settimeout(seconds + GRACE)
            for part in (json.dumps(order).encode(), *frames.values()):
                send(carrier, part)
            came = json.loads(receive(carrier))
            return {str(address): receive(carrier) for address in came}
        except (OSError, SiteError, ValueError) as error:
            self._lose(error)
            return {}
        except BaseException as stopped:
            self._lose(stopped)
            raise

    def close(self) -> None:
        for end in (self._carrier, self._counter):
            if end is not None:
                end.close()
        self._carrier = self._counter = None
        shutil.rmtree(self._folder, ignore_errors=True)

    # The carrier ----------------------------------------------------------------------------

    def _write_app(self) -> None:
        """Flower's app, and Flower's own config, which names the SuperLink."""
        app = self._folder / "app"
        app.mkdir()
        (app / "pyproject.toml").write_text(_APP)
        shutil.copy(Path(__file__).with_name("flower_app.py"), app / "relay.py")
        lines = ["[superlink]", 'default = "ours"', "[superlink.ours]"]
        lines.append(f'address = "{self._superlink}"')
        if self._certificate:
            path = Path(self._certificate).expanduser().resolve()
            lines.append(f"root-certificates = {json.dumps(str(path))}")
        elif self._superlink.rpartition(":")[0] in LOOPBACK:
            lines.append("insecure = true")
        home = self._folder / "flwr"
        home.mkdir()
        (home / "config.toml").write_text("\n".join(lines) + "\n")

    def _connect(self) -> socket.socket:
        assert self._counter is not None
        certificate = str(Path(self._certificate).expanduser()) if self._certificate else ""
        if problem := tls.probe(self._superlink, certificate):
            raise SiteError(f"run.superlink: {problem}")
        self._register()
        counter = json.dumps(str(self._folder / "counter"))
        self._flwr("run", str(self._folder / "app"), "ours", "--run-config", f"counter={counter}")
        self._counter.settimeout(START_SECONDS)
        try:
            self._carrier, _ = self._counter.accept()
        except TimeoutError:
            raise SiteError(
                f"Flower took a run and did not start it in {START_SECONDS:g} s. The SuperLink "
                "must be on this machine; look at its log"
            ) from None
        return self._carrier

    def _register(self) -> None:
        """Make the keys known, again where a SuperLink that restarted has forgotten them."""
        files = {} if self._pins is None else self._pins.files
        with ThreadPoolExecutor(REGISTER_AT_ONCE) as pool:
            for said in pool.map(self._registered_nodes, files.items()):
                log.debug("%s", said)

    def _registered_nodes(self, of: tuple[str, Path]) -> str:
        name, file = of
        command = ("supernode", "register", str(file), "ours", "--name", name)
        return self._flwr(*command, well=REGISTERED)

    def _flwr(self, *arguments: str, well: str = "") -> str:
        """Run Flower's command, and give what it says.

        Args:
            well: an error of which all is well that has this text.

        Raises:
            SiteError: it fails, or says nothing.
        """
        try:
            done = subprocess.run(
                [program("flwr"), *arguments], env=environment(self._folder / "flwr"),
                capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=START_SECONDS,
                check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise SiteError(f"flwr {arguments[0]} said nothing for {START_SECONDS:g} s") from None
        said = f"{done.stdout}\n{done.stderr}".strip()
        if done.returncode and not (well and well in said):
            last = " ".join(said.replace("│", " ").split())[-300:]
            raise SiteError(f"flwr {arguments[0]} failed: {last}. Look at the SuperLink's log")
        return said

    def _connected(self) -> socket.socket:
        if self._counter is None:
            raise OSError("closed")
        return self._carrier or self._connect()

    def _lose(self, error: BaseException) -> None:
        """Whatever the carrier still says could be taken for an answer to something else."""
        log.warning("Flower's run is gone (%s); another one carries the next letters", error)
        with suppress(OSError):
            if self._carrier is not None:
                self._carrier.close()
        self._carrier = None
