"""Checks of the machine: cores, threads, disk, memory, text and clock."""

import locale
import os
import resource
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from privssl.installation.finding import Finding, judge

CGROUP = Path("/sys/fs/cgroup")
LEAST_DISK, SMALL_DISK = 2**26, 2**30  # bytes: a run of digits needs 64 MB at most
SMALL_SHM = 2**26  # Docker's default
FEW_FILES = 256
DATA_VARIABLE = "PRIVSSL_DATA"


def check_cores() -> Iterator[Finding]:
    """Check the cores of the machine, of this process, and of its container."""
    total, usable = os.cpu_count() or 1, usable_cores()
    quota = container_cores()
    text = f"{usable} of {total} usable by this process"
    if quota is None:
        yield Finding("cores", "ok", f"{text}; no limit by a container")
    elif quota < usable:
        yield Finding(
            "cores", "note", f"{text}, but the container grants the time of {quota:g}",
            f"Set run.workers={max(1, int(quota))}: run.workers=auto would start {usable}.",
        )  # fmt: skip
    else:
        yield Finding("cores", "ok", f"{text}; the container grants {quota:g}")


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def container_cores(root: Path = CGROUP) -> float | None:
    """Return the CPU limit of cgroups version 2 or 1, in cores; None without a limit."""
    for quota, period in (
        (root / "cpu.max", None),
        (root / "cpu/cpu.cfs_quota_us", root / "cpu/cpu.cfs_period_us"),
    ):
        try:
            words = quota.read_text().split() + (period.read_text().split() if period else [])
            quota_us, period_us = int(words[0]), int(words[1])
        except (OSError, ValueError, IndexError):  # absent, or "max"
            continue
        if quota_us > 0 and period_us > 0:
            return quota_us / period_us
    return None


def check_threads(environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Check the number of threads of a training step."""
    threads = environment.get("OMP_NUM_THREADS")
    if threads is None or threads.strip() == "1":
        state = "is not set, which means 1 here" if threads is None else "is 1"
        yield Finding("threads", "ok", f"OMP_NUM_THREADS {state}")
    else:
        number = threads.split(",")[0].strip()
        invalid = not number.isdecimal() or int(number) < 1
        yield Finding(
            "threads", "problem" if invalid else "note",
            f"OMP_NUM_THREADS is {threads!r}"
            + (", which is no number of threads" if invalid else
               ": steps wait for their threads, agents are not divided among processes, and our "
               "kernels are off. A run can take several times as long"),
            "Set OMP_NUM_THREADS=1, or unset it.",
        )  # fmt: skip
    policy = environment.get("OMP_WAIT_POLICY", "")
    if policy.upper() == "PASSIVE":
        yield Finding("waiting threads", "ok", "OMP_WAIT_POLICY is PASSIVE")
    else:
        yield Finding(
            "waiting threads", "note",
            f"OMP_WAIT_POLICY is {policy or 'not set'}: waiting threads take time from others",
            "Set OMP_WAIT_POLICY=PASSIVE before Python starts; `make` does.",
        )  # fmt: skip


def check_disk() -> Iterator[Finding]:
    """Check free space and write permission for runs, data sets and temporary files."""
    tmpdir = os.environ.get("TMPDIR")
    if tmpdir and not os.access(tmpdir, os.W_OK | os.X_OK):
        yield Finding(
            "temporary files", "note", f"TMPDIR is {tmpdir!r}, where nothing can be written",
            "Make the folder, or unset TMPDIR.",
        )  # fmt: skip
    for name, folder in (("disk of runs", Path("runs")), ("disk of data sets", data_folder())):
        if folder is None:
            yield Finding(
                name, "problem", "the home folder is unknown (HOME is not set)",
                f"Set {DATA_VARIABLE} to a folder for data sets.",
            )  # fmt: skip
        else:
            yield _check_free_space(name, folder)


def data_folder() -> Path | None:
    """Return the folder of data sets; None if the home folder is unknown."""
    try:
        return Path(os.environ.get(DATA_VARIABLE) or "~/.cache/privssl/data").expanduser()
    except RuntimeError:
        return None


def _check_free_space(name: str, folder: Path) -> Finding:
    """Check the free space at a folder, or where it would be created. Writes nothing."""
    existing = folder.absolute()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    text = f"{folder}{'' if folder.exists() else ' (not there yet)'}"
    if not existing.is_dir():
        return Finding(name, "problem", f"{text}: {existing} is no folder", "Move that file away.")
    if not os.access(existing, os.W_OK | os.X_OK):
        return Finding(
            name, "problem", f"{text}: {existing} cannot be written",
            "Change its permissions, or give another folder (run.output; PRIVSSL_DATA).",
        )  # fmt: skip
    free = shutil.disk_usage(existing).free
    text = f"{text}: {_format_size(free)} free"
    if free >= SMALL_DISK:
        return Finding(name, "ok", text)
    too_little = free < LEAST_DISK
    text = f"{text}, which is {'too little' if too_little else 'little'}"
    return Finding(name, "problem" if too_little else "note", text, "Make room.")


def check_memory() -> Iterator[Finding]:
    """Check free memory, and the limits of shared memory and open files."""
    available = _read_available_memory()
    if available is not None:
        enough, text = available >= SMALL_DISK, f"{_format_size(available)} available"
        yield judge("memory", enough, text, "A run needs about 1 GB.", otherwise="note")
    shared = Path("/dev/shm")
    if shared.is_dir():
        total = shutil.disk_usage(shared).total
        advice = (
            "privssl does not need it, but data loaders of your own may: docker run --shm-size=1g."
        )
        yield judge("/dev/shm", total > SMALL_SHM, _format_size(total), advice, otherwise="note")
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = files == resource.RLIM_INFINITY
    text, advice = "no limit" if unlimited else f"at most {files}", f"ulimit -n {4 * FEW_FILES}."
    enough = unlimited or files >= FEW_FILES
    yield judge("open files", enough, text, f"Raise the limit: {advice}", otherwise="problem")


def _read_available_memory() -> int | None:
    """Return available bytes of the system or its container; None if unknown."""
    limits = []
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        limits += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")]
    except (OSError, ValueError, IndexError):
        pass
    try:
        limit, used = ((CGROUP / f"memory.{name}").read_text() for name in ("max", "current"))
        limits.append(max(0, int(limit) - int(used)))
    except (OSError, ValueError):  # absent, or "max"
        pass
    return min(limits, default=None)


def check_text_and_clock() -> Iterator[Finding]:
    """Check that all characters can be printed, and that the clock is plausible."""
    encoding = getattr(sys.stdout, "encoding", None) or locale.getpreferredencoding(False)
    is_utf8 = encoding.lower().replace("_", "-") in ("utf-8", "utf8")
    yield judge(
        "text", is_utf8, f"standard output is {encoding}",
        "Other letters are printed as escapes such as \\xe9. Set PYTHONUTF8=1, or LANG=C.UTF-8.",
        otherwise="note",
    )  # fmt: skip
    package_time, now = Path(__file__).stat().st_mtime, time.strftime("%Y-%m-%d %H:%M:%S %z")
    yield judge(
        "clock", time.time() >= package_time - 86_400, now,
        "It is before the date of privssl's own files. Set the clock: downloads and certificates "
        "of sites fail.", otherwise="problem",
    )  # fmt: skip


def _format_size(number: int) -> str:
    """Format bytes in the largest unit.

    >>> _format_size(2**26), _format_size(3 * 2**30)
    ('64 MB', '3.0 GB')
    """
    return f"{number / 2**30:.1f} GB" if number >= 2**30 else f"{number / 2**20:.0f} MB"
