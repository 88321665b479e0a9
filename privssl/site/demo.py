"""``python -m privssl.site.demo FOLDER``: a coordinator and its sites as processes on one machine.

Samples the split of a config, writes a SITE.yaml for each agent, and starts a SuperLink, one site
with its SuperNode for each agent, and the training command with ``run.engine: flower``. Messages
are encrypted (TLS) and names are pinned to keys, with certificates created here. All processes
listen on loopback only and end with this command. FOLDER keeps each site's SITE.yaml, ledger and
log.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import yaml
from rich.console import Console
from rich.table import Table

from privssl.errors import RunFolderError, UserError
from privssl.runtime.command import run_command
from privssl.runtime.plugins import imports_allowed
from privssl.site import keys
from privssl.site.supernode import end_group

CONFIG = "configs/fedssl_dp.yaml"
#: Five sites and few rounds, so that the demonstration takes minutes.
SMALL = ("agents.query=3", "algorithm.rounds=4", "algorithm.warm_up=1")
START_SECONDS = 120.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demonstration. Returns the exit status of the training command."""
    parser = argparse.ArgumentParser(
        prog="python -m privssl.site.demo",
        description="Train over sites on this machine, each a process.",
    )
    parser.add_argument("folder", type=Path, help="a new folder")
    parser.add_argument("overrides", nargs="*", default=[], metavar="section.key=value")
    parser.add_argument("--config", type=Path, default=None, help=f"default: a small {CONFIG}")
    options = parser.parse_intermixed_args(argv)

    def run(console: Console, stack: ExitStack) -> int:
        try:
            return demonstrate(options.folder, options.config, options.overrides, console)
        except OSError as error:
            path = error.filename or options.folder
            raise UserError(
                f"{path}: {error.strerror}. Free space, or give another folder"
            ) from error

    return run_command(run, json=False, interrupted="Stopped. All processes have ended.")


def demonstrate(
    folder: Path, config: Path | None, overrides: Sequence[str], console: Console
) -> int:
    """Write the sites, start all processes, train, print a summary, and audit the run."""
    from privssl.remote.flower_transport import program

    program("flower-superlink")  # before the folder is created
    names, key_folder = write_sites(folder, config, overrides), folder / "keys"
    keys.make(key_folder, "127.0.0.1", names)
    with ExitStack() as stack:
        address = stack.enter_context(superlink(folder / "superlink", made=key_folder))
        processes = {
            name: stack.enter_context(site(folder / name, address, *of_site(key_folder, name)))
            for name in names
        }
        for name, process in processes.items():
            wait_until((folder / name / "door").exists, process, folder / name / "out")
        console.print(f"{len(names)} sites: {', '.join(names)}. SuperLink at {address}.")
        status = end_of(train(folder, address, *of_coordinator(key_folder)))
    console.print(summary(folder, names))
    if status == 0:
        subprocess.run([sys.executable, "-m", "privssl.audit", str(folder / "run")], check=False)
    return status


def write_sites(folder: Path, config: Path | None, overrides: Sequence[str]) -> list[str]:
    """Write config, split and a SITE.yaml for each agent; return the agents' names.

    Raises privssl.errors.UserError if the config is invalid, or the folder exists.
    """
    from privssl.experiment import config as configs
    from privssl.experiment.plugin_names import names_in
    from privssl.experiment.prepare import prepare

    overridden = {text.partition("=")[0] for text in overrides}
    small = SMALL if config is None else ()
    settings = [*(text for text in small if text.partition("=")[0] not in overridden), *overrides]
    with imports_allowed():
        experiment = configs.load_config(config or Path(CONFIG), settings)
        prepared = prepare(experiment)
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise RunFolderError(f"{folder}: {error.strerror}. Give a new folder") from None
    prepared.federated_data.manifest.write(folder / "split.json")
    (folder / "experiment.yaml").write_text(configs.to_yaml(experiment))
    agents = [agent for agent in prepared.roster if agent.role != "server"]
    for agent in agents:
        site: dict[str, Any] = {
            "site": {
                "agent": agent.id, "role": agent.role, "config": "../experiment.yaml",
                "folder": ".", "share_ledger": True, "share_notes": True,
                "plugins": sorted(names_in(experiment)),
            },
            "rows": {"split": "../split.json"},
        }  # fmt: skip
        if agent.role != "query":
            privacy = experiment.privacy
            site["budget"] = privacy and {"epsilon": privacy.epsilon, "delta": privacy.delta}
        (folder / agent.id).mkdir(mode=0o700)
        (folder / agent.id / "site.yaml").write_text(yaml.safe_dump(site, sort_keys=False))
    return [agent.id for agent in agents]


# Processes --------------------------------------------------------------------------------------


@contextmanager
def superlink(folder: Path, port: int = 0, made: Path | None = None) -> Iterator[str]:
    """Run a SuperLink on loopback; yield its address.

    ``port``: 0 for a free one. ``made``: keys and certificates by ``privssl.site.keys``; None: no
    encryption, any site may connect.
    """
    from privssl.remote.flower_transport import environment, free_port, program

    folder.mkdir(exist_ok=True)
    port = port or free_port()
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

    def is_listening() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    with _start_process(command, folder / "log", environment(folder)) as process:
        wait_until(is_listening, process, folder / "log")
        yield f"127.0.0.1:{port}"


def of_site(made: Path, name: str) -> tuple[str, ...]:
    """Return the TLS arguments for an agent's site."""
    return "--certificate", str(made / "ca.crt"), "--key", str(made / name)


def of_coordinator(made: Path) -> tuple[str, ...]:
    """Return the TLS arguments for the training command."""
    return f"run.certificate={made / 'ca.crt'}", f"run.keys={made}"


@contextmanager
def site(folder: Path, address: str, *more: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run the site of a folder with its SuperNode."""
    command = [sys.executable, "-m", "privssl.site", str(folder / "site.yaml")]
    command += ["--superlink", address, *more]
    with _start_process(command, folder / "out", dict(os.environ)) as process:
        yield process


def train(
    folder: Path, address: str, *more: str, output: bool = True, stream: BinaryIO | None = None
) -> subprocess.Popen[bytes]:
    """Start the training command.

    Args:
        output: False for a resumed run, which has a run folder.
        stream: file for its output; None: this terminal.
    """
    command = [
        sys.executable, "-m", "privssl.train", str(folder / "experiment.yaml"),
        "run.engine=flower", f"run.superlink={address}", "run.workers=auto", *more,
        *([f"run.output={folder / 'run'}"] if output else []),
    ]  # fmt: skip
    return subprocess.Popen(command, stdout=stream, stderr=stream)


def end_of(process: subprocess.Popen[bytes]) -> int:
    """Wait for a process and return its exit status; it has ended even if this raises. Ctrl-C
    interrupts it: a training command writes a checkpoint and requests its sites' ledgers."""
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)  # only this process got the SIGTERM
        return process.wait()
    finally:
        process.kill()
        process.wait()


@contextmanager
def _start_process(
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
        end_group(process, seconds=10)


def wait_until(ready: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until a process is ready. Raises UserError if it ends or takes too long."""
    deadline = time.monotonic() + START_SECONDS
    while not ready():
        if process.poll() is not None or time.monotonic() > deadline:
            output = log.read_text(errors="replace").strip()[-500:]
            raise UserError(f"{' '.join(map(str, process.args[:4]))} did not start: {output}")  # type: ignore[index]
        time.sleep(0.1)


def summary(folder: Path, names: Sequence[str]) -> Table:
    """Summarise each site from its log and ledger."""
    from accounting.ledger import read_journal

    table = Table("site", "steps run", "stored replies resent", "charged", "epsilon")
    for name in names:
        log = (folder / name / "site.log").read_text()
        cells = [str(log.count(" done\n")), str(log.count(": the stored reply")), "-", "-"]
        path = folder / name / "ledger" / f"{name}.jsonl"
        if path.exists():
            journal = read_journal(path)
            cells[2:] = [str(len(journal.events)), f"{journal.epsilon:.4f}"]
        table.add_row(name, *cells)
    return table


if __name__ == "__main__":
    sys.exit(main())
