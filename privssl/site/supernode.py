"""The SuperNode of a site: Flower's process that brings letters to the door, started and kept up.

It gets the path of the door and nothing else of the site, and runs behind a fence
(site/sandbox.py): a SuperLink sends it code. Where there can be no fence, none is started for a
SuperLink on another machine. An operator who wants the SuperNode under another user of the system
starts it by hand instead: docs/deploy.md.

    nobody answers, or TLS fails     none is started; why is said, and looked at again
    (remote/tls.py)
    the SuperLink refuses it         what Flower said is translated, and another one follows
    it ends otherwise                another one follows after a pause
    it loses the SuperLink           it tries for a minute, ends, and the first line holds

A SuperNode alone would try for ever, and not say what is wrong.
"""

import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from privssl.errors import ConfigError
from privssl.remote import tls
from privssl.remote.flower_transport import environment, program
from privssl.settings.schema import LOOPBACK
from privssl.site import sandbox

PAUSE = 15.0  # seconds before another SuperNode
LOOK = 3.0  # seconds between two looks at a SuperLink that cannot be spoken with
LOST = 60  # seconds in which a SuperNode may try to reach a SuperLink again
#: What a SuperLink answers to a SuperNode that wants in (flwr.supercore.error), for an operator.
_REFUSED = {
    "2001": "the SuperLink asks every site for a key. Give --key, and the public one (.pub) to "
    "whoever runs the coordinator (run.keys)",
    "2004": "the SuperLink does not know the key of this site, or takes its former SuperNode "
    "for alive, which passes within a minute or so. If it goes on: give the public key (.pub) to "
    "whoever runs the coordinator (run.keys)",
}
_CODE = re.compile(r"\[code: ([0-9]+)\]")
_TAIL = 2**16  # bytes of its log in which the reason is looked for
_KEY = "-----BEGIN OPENSSH PRIVATE KEY-----"

log = logging.getLogger("privssl")


class SuperNode:
    """Keeps a SuperNode running from ``start`` to ``stop``."""

    def __init__(
        self, door: Path, folder: Path, superlink: str, certificate: str, key: str,
        secrets: Sequence[Path] = (),
    ) -> None:  # fmt: skip
        """
        Args:
            door: of the site.
            folder: for Flower's own files, which it may write; its log lies beside it.
            superlink: host:port.
            certificate: root certificate of the SuperLink; empty on loopback alone.
            key: private key of this node; empty where the SuperLink asks for none.
            secrets: what it must not read: folders and files of the site.

        Raises:
            ConfigError: letters would cross a network in clear, or code from another machine would
                run as this user without a fence, or secrets lie inside of it; certificate or key
                is none.
            SiteError: Flower is not installed.
        """
        host, _, port = superlink.rpartition(":")
        if not (host and port.isdecimal()):
            raise ConfigError(f"--superlink is {superlink!r}: give host:port")
        if host not in LOOPBACK and not certificate:
            raise ConfigError(
                f"letters to {host} would cross a network in clear. Give --certificate, the root "
                "certificate of its SuperLink"
            )
        if host not in LOOPBACK and not sandbox.version():
            raise ConfigError(
                "this system has no Landlock (Linux 5.13 or later), so that code which the "
                "SuperLink sends could read rows and ledger as this user. Use --serve, and start "
                "flower-supernode as another user: docs/deploy.md"
            )
        if not sandbox.version():
            log.warning(
                "No fence: this system has no Landlock, so that code which the SuperLink on this "
                "machine sends can read rows and ledger. For trials alone"
            )
        check_files(certificate, key)
        files = [Path(path) for path in (certificate, key) if path]
        self._command = [
            *(_sandboxed_command(folder, files, secrets) if sandbox.version() else []),
            program("flower-supernode"), "--superlink", superlink,
            *(["--root-certificates", certificate] if certificate else ["--insecure"]),
            *(["--auth-supernode-private-key", key] if key else []),
            "--node-config", f'door="{door}"', "--max-wait-time", str(LOST),
        ]  # fmt: skip
        self._superlink, self._certificate = superlink, certificate
        self._folder = folder
        # Beside the folder: in it, shipped code could put a link to any file of this user in the
        # log's place, and would be given that file to write into when the next one starts.
        self._log = folder.with_name("supernode.log")
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._keep_up, daemon=True)

    def start(self) -> None:
        """Start it, and watch over it."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._thread.start()

    def stop(self) -> None:
        """End it and what it started. May be called twice."""
        self._stopped.set()
        self._end(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            if self._process is not None:
                self._process.wait(timeout=5)
        self._end(signal.SIGKILL)

    def _keep_up(self) -> None:
        said = ""
        while not self._stopped.is_set():
            trouble = tls.probe(self._superlink, self._certificate)
            if trouble:
                if trouble != said:
                    log.warning("No SuperNode yet: %s", trouble)
                said = trouble
                self._stopped.wait(LOOK)
                continue
            said = ""
            log.info("Starts a SuperNode for the SuperLink at %s", self._superlink)
            why = self._run()
            if not self._stopped.is_set():
                log.warning("The SuperNode ended: %s. Another one follows", why)
                self._end(signal.SIGKILL)
                self._stopped.wait(PAUSE)

    def _run(self) -> str:
        """A SuperNode until it ends; why it did."""
        with self._log.open("ab") as out:
            begins = out.tell()
            port = ["--host", "127.0.0.1", "--port", str(_free_port())]  # for its own helpers
            own = {**environment(self._folder), "TMPDIR": str(self._folder)}
            self._process = subprocess.Popen(
                [*self._command, *port], env=own, stdout=out, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        status = self._process.wait()
        with self._log.open("rb") as log_:
            log_.seek(max(begins, log_.seek(0, os.SEEK_END) - _TAIL))
            code = _CODE.search(log_.read().decode(errors="replace"))
        if code is not None and code[1] in _REFUSED:
            return _REFUSED[code[1]]
        return f"status {status}, see {self._log}"

    def _end(self, number: signal.Signals) -> None:
        """Its helpers are in its process group."""
        if self._process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)


def check_files(certificate: str, key: str) -> None:
    """Look at what the operator gave for TLS. Raises ConfigError where it is none.

    A certificate that expires soon is spoken of in the log.
    """
    if certificate and (warning := tls.check_root(Path(certificate))):
        log.warning("%s", warning)
    if not key:
        return
    try:
        first = Path(key).read_text(encoding="ascii", errors="replace").partition("\n")[0]
    except OSError as error:
        raise ConfigError(f"{key}: {error.strerror}. Give the private key of this site") from None
    if first.strip() != _KEY:
        raise ConfigError(
            f"{key}: not a private key of OpenSSH. Make one: ssh-keygen -t ecdsa -b 384 -N '' -f "
            "FILE"
        )


def _sandboxed_command(folder: Path, files: Sequence[Path], secrets: Sequence[Path]) -> list[str]:
    """What stands before a command that gets nothing but its folder and these files."""
    command = Path(program("flower-supernode"))
    prefix = command.parents[1]
    # A virtual environment has Flower's libraries beside its programs.
    needed = [prefix] if (prefix / "pyvenv.cfg").exists() else [command]
    for secret in (path.resolve() for path in secrets):
        for opened in (path.resolve() for path in (*sandbox.readable(), *needed, folder)):
            if secret.is_relative_to(opened):
                raise ConfigError(
                    f"{secret} is in {opened}, which a SuperNode has to read. Put what belongs to "
                    "the site elsewhere"
                )
    reads = [part for path in (*needed, *files) for part in ("--read", str(path))]
    # One that outlived its site would bring letters to the next one's door, beside its own.
    how = ["--parent", str(os.getpid()), "--write", str(folder), *reads, "--"]
    return [sys.executable, str(Path(sandbox.__file__)), *how]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
