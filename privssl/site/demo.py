"""``python -m privssl.site.demo FOLDER``: a coordinator and its sites as processes on one machine.

Draws the split of a config, writes a SITE.yaml for each agent, and starts what a real deployment
has on machines of their own: a SuperLink, one site with its SuperNode for each agent, and the
training command with ``run.engine: flower``. Letters go through TLS, every site has a key, and its
name is pinned to it, by keys and certificates that are made here. All of it listens on loopback
alone and ends with this command. What remains is in FOLDER, to be looked at: SITE.yaml, ledger and
log of each site.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import yaml
from rich.console import Console
from rich.table import Table

from privssl.errors import RunFolderError, UserError
from privssl.runtime.process import INTERRUPTED
from privssl.site import keys

CONFIG = "configs/fedssl_dp.yaml"
#: Five sites, and so few rounds that the demonstration takes minutes.
SMALL = ("agents.query=3", "algorithm.rounds=4", "algorithm.warm_up=1")
START_SECONDS = 120.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demonstration; returns the exit status of the training command."""
    options = _parser().parse_intermixed_args(argv)
    console = Console(highlight=False, soft_wrap=True)
    try:
        return demonstrate(options.folder, options.config, options.overrides, console)
    except UserError as problem:
        console.print(str(problem), style="yellow", markup=False)
        return problem.exit_status
    except KeyboardInterrupt:
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m privssl.site.demo",
        description="Train over sites that are processes on this machine.",
    )
    parser.add_argument("folder", type=Path, help="made here; must not exist")
    parser.add_argument("overrides", nargs="*", default=[], metavar="section.key=value")
    parser.add_argument("--config", type=Path, default=None, help=f"default: a small {CONFIG}")
    return parser


def demonstrate(
    folder: Path, config: Path | None, overrides: Sequence[str], console: Console
) -> int:
    """Write the sites, start everything, train, show the visits, and audit the claim."""
    names, made = write_sites(folder, config, overrides), folder / "keys"
    keys.make(made, "127.0.0.1", names)
    with ExitStack() as stack:
        address = stack.enter_context(superlink(folder / "superlink", made=made))
        for name in names:
            stack.enter_context(site(folder / name, address, *of_site(made, name)))
        for name in names:
            wait_for_site(folder / name)
        console.print(f"{len(names)} sites: {', '.join(names)}. SuperLink at {address}.")
        status = train(folder, address, *of_coordinator(made)).wait()
    console.print(visits(folder, names))
    if status == 0:  # the last words: the claim, and that the ledgers of the sites bear it out
        subprocess.run([sys.executable, "-m", "privssl.audit", str(folder / "run")], check=False)
    return status


# What a deployment has ------------------------------------------------------------------------


def write_sites(folder: Path, config: Path | None, overrides: Sequence[str]) -> list[str]:
    """A folder with config, split and a SITE.yaml for each agent; their names.

    Raises:
        privssl.errors.UserError: the config cannot be run, or the folder exists.
    """
    from privssl.experiment import config as configs
    from privssl.experiment.prepare import prepare

    given = {text.partition("=")[0] for text in overrides}
    small = SMALL if config is None else ()
    chosen = [*(text for text in small if text.partition("=")[0] not in given), *overrides]
    loaded = configs.load_config(config or Path(CONFIG), chosen)
    prepared = prepare(loaded)
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise RunFolderError(
            f"{folder}: {error.strerror}. Give a folder that is not there yet"
        ) from None
    prepared.federated_data.manifest.write(folder / "split.json")
    (folder / "experiment.yaml").write_text(configs.to_yaml(loaded))
    names = []
    for agent in prepared.roster:
        if agent.role == "server":
            continue
        names.append(agent.id)
        (folder / agent.id).mkdir(mode=0o700)
        site: dict[str, Any] = {
            "site": {
                "agent": agent.id, "role": agent.role, "config": "../experiment.yaml",
                "folder": ".", "share_ledger": True, "share_notes": True,
            },
            "rows": {"split": "../split.json"},
        }  # fmt: skip
        if agent.role != "query":
            privacy = loaded.privacy
            site["budget"] = privacy and {"epsilon": privacy.epsilon, "delta": privacy.delta}
        (folder / agent.id / "site.yaml").write_text(yaml.safe_dump(site, sort_keys=False))
    return names


@contextmanager
def superlink(folder: Path, port: int = 0, made: Path | None = None) -> Iterator[str]:
    """A SuperLink on loopback; its address.

    Args:
        port: 0 for one that is free.
        made: keys and certificates, by ``privssl.site.keys``; None: letters go in clear, and
            whoever comes is let in.
    """
    from privssl.remote.flower_transport import environment, program

    folder.mkdir(exist_ok=True)
    port = port or _free_port()
    command = [
        program("flower-superlink"), "--host", "127.0.0.1", "--port", str(port),
        "--disable-runtime-dependency-installation",
    ]  # fmt: skip
    if made is None:
        command.append("--insecure")
    else:
        command += ["--ssl-ca-certfile", str(made / "ca.crt"), "--enable-supernode-auth"]
        command += ["--ssl-certfile", str(made / "link.crt")]
        command += ["--ssl-keyfile", str(made / "link.key")]
    with _running(command, folder / "log", environment(folder)) as process:
        _wait(lambda: _listens(port), process, folder / "log")
        yield f"127.0.0.1:{port}"


def of_site(made: Path, name: str) -> tuple[str, ...]:
    """Arguments for the site of an agent."""
    return "--certificate", str(made / "ca.crt"), "--key", str(made / name)


def of_coordinator(made: Path) -> tuple[str, ...]:
    """Arguments for the training command."""
    return f"run.certificate={made / 'ca.crt'}", f"run.keys={made}"


@contextmanager
def site(folder: Path, address: str, *more: str) -> Iterator[subprocess.Popen[bytes]]:
    """The site of a folder, with its SuperNode, on its way."""
    command = [sys.executable, "-m", "privssl.site", str(folder / "site.yaml")]
    command += ["--superlink", address, *more]
    with _running(command, folder / "out", dict(os.environ)) as process:
        yield process


def wait_for_site(folder: Path) -> None:
    """Wait until a site answers. Raises UserError where it does not start."""
    end = time.monotonic() + START_SECONDS
    while not (folder / "door").exists():
        if time.monotonic() > end:
            said = (folder / "out").read_text(errors="replace").strip()[-500:]
            raise UserError(f"the site {folder.name} did not start: {said}")
        time.sleep(0.1)


def train(
    folder: Path, address: str, *more: str, output: bool = True, said: BinaryIO | None = None
) -> subprocess.Popen[bytes]:
    """The training command, on its way.

    Args:
        output: not for a run that goes on, which has one.
        said: file for what it says; None: this terminal.
    """
    command = [
        sys.executable, "-m", "privssl.train", str(folder / "experiment.yaml"),
        "run.engine=flower", f"run.superlink={address}", "run.workers=auto", *more,
        *([f"run.output={folder / 'run'}"] if output else []),
    ]  # fmt: skip
    return subprocess.Popen(command, stdout=said, stderr=said)


@contextmanager
def _running(
    command: Sequence[str], log: Path, environment: dict[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            env=environment, start_new_session=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)


def _wait(true: Any, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while not true():
        if process.poll() is not None or time.monotonic() > end:
            said = log.read_text(errors="replace").strip()[-500:]
            raise UserError(f"{' '.join(map(str, process.args[:4]))} did not start: {said}")  # type: ignore[index]
        time.sleep(0.1)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def visits(folder: Path, names: Sequence[str]) -> Table:
    """What each site did, by its own log and ledger."""
    from accounting.ledger import read_journal

    table = Table("site", "visits done", "stored replies sent again", "charged", "epsilon")
    for name in names:
        log = (folder / name / "site.log").read_text()
        cells = [str(log.count(" done\n")), str(log.count(": the stored reply"))]
        journal = folder / name / "ledger" / f"{name}.jsonl"
        if journal.exists():
            found = read_journal(journal)
            cells += [str(len(found.events)), f"{found.epsilon:.4f}"]
        else:
            cells += ["-", "-"]
        table.add_row(name, *cells)
    return table


if __name__ == "__main__":
    sys.exit(main())
