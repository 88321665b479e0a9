"""Run, time and measure other programs for benchmarks, and end all their processes.

A program's processes inherit a mark in their environment, by which they are found: some (Ray's)
leave their process group and their parent. Linux only.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

MARK = "PRIVSSL_BENCHMARK"
SIGN = "#benchmark "  # begins a line of standard output that is meant for the benchmark
EVERY = 0.25  # seconds between two memory readings
CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Told:
    """The results of a program."""

    begun: float  # time.monotonic(), which all processes of a machine share
    lines: tuple[dict[str, Any], ...]  # its lines for the benchmark, in order
    peak_pss: float  # MB of all its processes; pages that several share are counted once
    cpu: tuple[tuple[float, float], ...]  # (time, CPU seconds of all its processes until then)
    status: int
    errors: str  # the end of what it wrote to standard error

    def cpu_between(self, one: float, other: float) -> float:
        """Return the CPU seconds of its processes between two times, without other processes."""
        times, used = zip(*self.cpu, strict=True)
        start, end = np.interp([one, other], times, used)
        return float(end - start)


def tell(**values: Any) -> None:
    """Print a line for the benchmark, with the time; called in the program."""
    print(SIGN + json.dumps({"at": time.monotonic(), **values}), flush=True)


def carry_out(
    commands: Sequence[Sequence[str]],
    environments: Sequence[Mapping[str, str]],
    *,
    limit: float,
) -> Told:
    """Run commands in parallel until the first of them ends, then end the others.

    They stay in the session of this process: Linux shares cores between sessions (autogroup), and a
    program of two commands would get twice the share.

    Args:
        commands: the first is the one whose lines and errors count.
        environments: added to this process's, one for each command.
        limit: seconds after which all are killed; the status is then -9.
    """
    mark, quiet = uuid.uuid4().hex, subprocess.DEVNULL
    start = time.monotonic()
    peak, cpu_seconds, readings = 0.0, dict[int, float](), [(start, 0.0)]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        running: list[subprocess.Popen[bytes]] = []
        try:
            for command, variables in zip(commands, environments, strict=True):
                streams = (quiet, quiet) if running else (out, err)
                environment = {**os.environ, **variables, MARK: mark}
                running.append(
                    subprocess.Popen(command, env=environment, stdout=streams[0], stderr=streams[1])
                )
            while running[0].poll() is None and time.monotonic() - start < limit:
                marked = _find_marked(mark)
                peak = max(peak, sum(map(pss, marked)))
                cpu_seconds |= {
                    process: _read_cpu_seconds(process) or cpu_seconds.get(process, 0.0)
                    for process in marked
                }
                readings.append((time.monotonic(), sum(cpu_seconds.values())))
                with suppress(subprocess.TimeoutExpired):
                    running[0].wait(EVERY)
            for process in running[1:]:  # they end after the first, if it succeeded
                with suppress(subprocess.TimeoutExpired):
                    process.wait(5 if running[0].poll() == 0 else 0)
        finally:
            end_all(mark)
            for process in running:
                process.wait()
        for file in (out, err):
            file.seek(0)
        lines = [json.loads(s.removeprefix(SIGN)) for s in out if s.startswith(SIGN)]
        errors = err.read()[-2000:]
    return Told(start, tuple(lines), peak, tuple(readings), running[0].returncode, errors)


def parser_of(module: str, about: str | None) -> argparse.ArgumentParser:
    """Return the parser of ``benchmarks.MODULE``, with the module's docstring as its help."""
    return argparse.ArgumentParser(
        prog=f"benchmarks.{module}", description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip


def at_least(least: int) -> Callable[[str], int]:
    """Return an argparse type: integers >= ``least``."""

    def parse_number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"a whole number from {least} is needed, not {text}")
        return int(text)

    return parse_number


def numbers(text: str) -> list[int]:
    """Parse integers >= 1, separated by commas; an argparse type."""
    return [at_least(1)(part) for part in text.split(",")]


def configs_of(
    parser: argparse.ArgumentParser, words: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Split words into configs (at least one) and overrides for all of them."""
    configs = [word for word in words if "=" not in word]
    if not configs:
        parser.error("which config? Give a YAML file, for example configs/semifl.yaml")
    return configs, [word for word in words if "=" in word]


def beside_option(parser: argparse.ArgumentParser) -> None:
    """Add the option with the number of processes of ``other_work``."""
    parser.add_argument(
        "--beside", type=at_least(0), default=0, metavar="N",
        help="other processes that each keep a core busy (0)",
    )  # fmt: skip


@contextmanager
def other_work(processes: int) -> Iterator[None]:
    """Keep one core busy per process while the context is open.

    Each process has its own session, by which Linux shares cores (autogroup). Each ends when its
    pipe closes, even if the benchmark is killed.
    """
    busy = "import os, threading as t\n"
    busy += "t.Thread(target=lambda: (os.read(0, 1), os._exit(0))).start()\nwhile True: pass"
    with ExitStack() as stack:
        for _ in range(processes):
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", busy], stdin=subprocess.PIPE, start_new_session=True
                )
            )
        yield


def end_all(word: str) -> None:
    """Kill every process that carries the mark, until there is none."""
    for _ in range(50):
        processes = _find_marked(word)
        if not processes:
            return
        for process in processes:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.1)


def _find_marked(word: str) -> list[int]:
    processes, variable = [], f"{MARK}={word}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if variable in (entry / "environ").read_bytes().split(b"\0"):
                    processes.append(int(entry.name))
    return processes


def pss(process: int) -> float:
    """Return the PSS in megabytes; 0 for an ended process."""
    with suppress(OSError):
        for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    return 0.0


def _read_cpu_seconds(process: int) -> float:
    """Return user and system seconds; 0 for an ended process."""
    with suppress(OSError):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def about() -> str:
    """Describe machine, versions and kernels in one line for the head of a table. Any system."""
    # Imported here: environments of other frameworks have no privssl.
    from privssl.installation.machine import usable_cores
    from privssl.ops import dispatch
    from privssl.reproduce.machine import processor

    chip = processor(CPUINFO)
    # The name alone does not identify a generation: "AMD EPYC" is Zen 4 (family 25) and Zen 5 (26),
    # whose AVX-512 is twice as wide.
    numbers = ", ".join(f"{key} {chip[key]}" for key in ("family", "model") if chip[key])
    name = f"{chip['name']} ({numbers})" if numbers else chip["name"]
    load = f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"
    return (
        f"{name}, {usable_cores()} cores, Python {platform.python_version()}, "
        f"torch {version('torch')}, kernels: {dispatch.instruction_set() or 'torch'}. "
        f"Load average at the start: {load} (of other work, if this began on its own)"
    )
