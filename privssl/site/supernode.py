"""Keep Flower's SuperNode running beside a site; it relays messages to the site's socket.

The SuperNode gets only the path of the site's socket. It runs in a sandbox (site/sandbox.py),
because a SuperLink sends it code. Without Landlock none is started for a SuperLink on another
machine; docs/deploy.md explains how to run one as another system user.

    the SuperLink does not answer, or TLS fails    the reason is logged, and probed again
    the SuperLink refuses the SuperNode            the reason is logged, and another is started
    the SuperNode ends                             another one is started after a pause

Flower alone would retry for ever and not log the reason.
"""

import logging
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from privssl.errors import ConfigError
from privssl.remote import tls
from privssl.remote.flower_transport import environment, free_port, program
from privssl.settings.addresses import LOOPBACK, host_of
from privssl.site import sandbox

RESTART_SECONDS = 15.0  # before another SuperNode starts
PROBE_SECONDS = 3.0  # between two probes of a SuperLink that cannot be reached
RETRY_SECONDS = 60  # for a SuperNode to reach its SuperLink again
#: A SuperLink's reasons to refuse a SuperNode (flwr.supercore.error), for the operator.
_REFUSED = {
    "2001": "the SuperLink requires a key of every site. Give --key, and send the public key "
    "(.pub) to whoever runs the coordinator (run.keys)",
    "2004": "the SuperLink does not know the key of this site, which a run makes known when it "
    "begins, or still lists its previous SuperNode, which passes within a minute. If it persists "
    "during a run, send the public key (.pub) to whoever runs the coordinator (run.keys)",
}
_CODE = re.compile(r"\[code: ([0-9]+)\]")
#: A SuperNode whose signature is refused ends without a reason (flwr.common.constant).
_CLOCK = (
    ". If this repeats, compare the clocks: the SuperLink refuses a signature of a machine that is "
    "more than 5 s ahead or 305 s behind"
)
_TAIL = 2**16  # bytes of its log that are searched for the reason
_OPENSSH = b"-----BEGIN OPENSSH PRIVATE KEY-----"

log = logging.getLogger("privssl")


class SuperNode:
    """Keeps a SuperNode running from ``start`` to ``stop``."""

    def __init__(
        self, door: Path, folder: Path, superlink: str, certificate: str, key: str,
        secrets: Sequence[Path] = (),
    ) -> None:  # fmt: skip
        """Check the settings.

        Args:
            door: socket of the site.
            folder: for Flower's own files; its log is beside it.
            superlink: host:port.
            certificate: root certificate of the SuperLink; empty on loopback only.
            key: private key of this site; empty if the SuperLink requires none.
            secrets: files and folders of the site, which the SuperNode must not read.

        Raises:
            ConfigError: messages would cross a network unencrypted, code from another machine would
                run without a sandbox, or secrets would be inside it; a key without a certificate.
            SiteError: Flower is not installed.
        """
        host = host_of(superlink)
        if not host:
            raise ConfigError(f"--superlink is {superlink!r}: give host:port, the port up to 65535")
        if host not in LOOPBACK and not certificate:
            raise ConfigError(
                f"Messages to {host} would cross a network in clear. Give --certificate, the root "
                "certificate of its SuperLink"
            )
        if key and not certificate:
            raise ConfigError(
                "--key needs --certificate, the root certificate of the SuperLink: Flower signs "
                "over TLS only. Give both, or neither"
            )
        if host not in LOOPBACK and not sandbox.version():
            raise ConfigError(
                "This system has no Landlock (Linux 5.13 or later), so code from the SuperLink "
                "could read rows and ledger. Use --serve, and start flower-supernode as another "
                "user: docs/deploy.md"
            )
        files = [Path(path) for path in (certificate, key) if path]
        self._command = [
            *(_build_sandboxed_command(folder, files, secrets) if sandbox.version() else []),
            program("flower-supernode"), "--superlink", superlink,
            *(["--root-certificates", certificate] if certificate else ["--insecure"]),
            *(["--auth-supernode-private-key", key] if key else []),
            "--node-config", f'door="{door}"', "--max-wait-time", str(RETRY_SECONDS),
        ]  # fmt: skip
        self._superlink, self._certificate, self._signs = superlink, certificate, bool(key)
        self._folder = folder
        # Outside the folder: otherwise shipped code could replace the log by a link to any file of
        # this user, which the next start would open for writing.
        self._log = folder.with_name("supernode.log")
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._keep_running, daemon=True)

    def start(self) -> None:
        """Start the SuperNode and its supervision."""
        self._thread.start()

    def stop(self) -> None:
        """End the SuperNode and its processes. May be called twice."""
        self._stopped.set()
        self._end()

    def _keep_running(self) -> None:
        logged = ""
        while not self._stopped.is_set():
            problem = tls.probe(self._superlink, self._certificate)
            if problem and problem != logged:
                log.warning("No SuperNode yet: %s", problem)
            logged = problem
            if problem:
                self._stopped.wait(PROBE_SECONDS)
                continue
            log.info("Starting a SuperNode for the SuperLink at %s", self._superlink)
            try:
                reason = self._run()
            except OSError as error:  # e.g. a full disk, which may pass: keep supervising
                reason = f"{error}. Check space and rights of {self._folder}"
            if not self._stopped.is_set():
                log.warning("The SuperNode ended: %s. Starting another one", reason)
                self._end()  # its child processes
                self._stopped.wait(RESTART_SECONDS)

    def _run(self) -> str:
        """Run a SuperNode until it ends; return the reason."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._log.open("ab") as out:
            log_start = out.tell()
            port = ["--host", "127.0.0.1", "--port", str(free_port())]  # for Flower's own processes
            env = {**environment(self._folder), "TMPDIR": str(self._folder)}
            self._process = subprocess.Popen(
                [*self._command, *port], env=env, stdout=out, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        if self._stopped.is_set():  # stop may have been called before the process existed
            self._end()
        status = self._process.wait()
        with self._log.open("rb") as log_:
            log_.seek(max(log_start, log_.seek(0, os.SEEK_END) - _TAIL))
            code = _CODE.search(log_.read().decode(errors="replace"))
        if code and code[1] in _REFUSED:
            return _REFUSED[code[1]]
        return f"status {status}, see {self._log}{_CLOCK if self._signs else ''}"

    def _end(self) -> None:
        if self._process is not None:
            end_group(self._process, seconds=5)


def end_group(process: subprocess.Popen[bytes], seconds: float) -> None:
    """End a process and its group: SIGTERM, and SIGKILL after ``seconds``."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=seconds)


def check_files(certificate: str, key: str) -> None:
    """Check the operator's certificate and key; log if the certificate expires soon.

    Raises ConfigError if one is invalid.
    """
    if certificate and (warning := tls.check_root(Path(certificate))):
        log.warning("%s", warning)
    if not key:
        return
    try:
        data = Path(key).read_bytes()
    except OSError as error:
        raise ConfigError(f"{key}: {error.strerror}. Give the private key of this site") from None
    if problem := _find_key_problem(data):
        raise ConfigError(f"{key}: {problem}. Make one: ssh-keygen -t ecdsa -b 384 -N '' -f FILE")


def _find_key_problem(data: bytes) -> str:
    """Return why Flower could not sign with a private key; empty if it can."""
    not_openssh = "not a private key of OpenSSH"
    if data.partition(b"\n")[0].strip() != _OPENSSH:
        return not_openssh
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
        from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    except ImportError:  # Flower depends on it
        return ""
    try:
        key = load_ssh_private_key(data, None)
    except TypeError:
        return "protected by a password, which a SuperNode cannot give"
    except (ValueError, UnsupportedAlgorithm):
        return not_openssh
    return "" if isinstance(key, EllipticCurvePrivateKey) else "not an ECDSA key"


def _build_sandboxed_command(
    folder: Path, files: Sequence[Path], secrets: Sequence[Path]
) -> list[str]:
    """Return the command prefix that restricts a command to its folder and these files."""
    command = Path(program("flower-supernode"))
    prefix = command.parents[1]
    # A virtual environment has Flower's libraries beside its programs.
    required = [prefix] if (prefix / "pyvenv.cfg").exists() else [command]
    for secret in (path.resolve() for path in secrets):
        for readable in (path.resolve() for path in (*sandbox.readable(), *required, folder)):
            if secret.is_relative_to(readable):
                raise ConfigError(
                    f"{secret} is in {readable}, which a SuperNode has to read. Move the site's "
                    "files elsewhere"
                )
    reads = [part for path in (*required, *files) for part in ("--read", str(path))]
    # A SuperNode that outlived its site would relay messages to the next one's socket.
    arguments = ["--parent", str(os.getpid()), "--write", str(folder), *reads, "--"]
    return [sys.executable, str(Path(sandbox.__file__)), *arguments]
