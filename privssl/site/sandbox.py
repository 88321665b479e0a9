"""Run a command in a Landlock sandbox: without access to rows, ledger or other processes.

A SuperLink sends its SuperNodes code to run. With the rights of the site's user that code could
read the site's folder without an account. So the SuperNode runs under Landlock (Linux 5.13 and
later; Salaün, https://docs.kernel.org/userspace-api/landlock.html): it can read what Python and
Flower need, write its own folder, and connect to the site's socket. It cannot inspect processes
outside the sandbox nor, from Linux 6.12 on, signal them.

    python -m privssl.site.sandbox --write FOLDER [--read PATH ...] [--parent PID] -- COMMAND ...

The sandbox covers all descendants and cannot be lifted. It does not cover other sockets of the
same user (a session bus, a key agent), sizes and permissions of files, limits of other processes,
nor for root their environment. A separate system user is stronger; docs/deploy.md explains how.
"""

import argparse
import ctypes
import os
import signal
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

# System calls and flags are the same on every architecture: linux/landlock.h.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION, _PATH_BENEATH, _NO_NEW_PRIVILEGES, _PARENT_DEATH_SIGNAL = 1, 1, 38, 1
_EXECUTE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 2, 1 << 3
_OF_FILES = (1 << 0) | (1 << 1) | (1 << 2) | (1 << 14) | (1 << 15)  # rights that apply to a file
_READ = _EXECUTE | _READ_FILE | _READ_DIR
#: Number of rights by version: 13, then move, truncate, and device ioctl.
_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
_SCOPED = 0b11  # from version 6: no abstract sockets and no signals across the sandbox
#: Folders of programs and their libraries.
SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/etc", "/proc", "/sys", "/nix")
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")


def version() -> int:
    """Return the version of Landlock in this kernel; 0: none."""
    if sys.platform != "linux":
        return 0
    return max(_call_kernel(_CREATE_RULESET, None, 0, _VERSION), 0)


def readable() -> list[Path]:
    """List the paths that a program of this Python must read."""
    own = {sys.prefix, sys.base_prefix, sys.exec_prefix, *(p for p in sys.path if "site-pack" in p)}
    paths = (Path(text) for text in (*SYSTEM, *sorted(own)))
    return [path for path in paths if path.exists()]


def restrict(read: Sequence[Path], write: Sequence[Path]) -> None:
    """Restrict this process and its descendants permanently to these files.

    Raises OSError if the kernel has no Landlock, or a path does not exist.
    """
    abi = version()
    if not abi:
        raise OSError("this kernel has no Landlock")
    rights = (1 << _RIGHTS.get(abi, 16)) - 1
    attributes = struct.pack("=QQQ", rights, 0, _SCOPED if abi >= 6 else 0)
    ruleset = _check_result(_call_kernel(_CREATE_RULESET, attributes, 24 if abi >= 6 else 8, 0))
    for paths, allowed in ((read, _READ), (write, rights)):
        for path in paths:
            file = os.open(path, os.O_PATH | os.O_CLOEXEC)
            granted = allowed & rights if path.is_dir() else allowed & rights & _OF_FILES
            rule = struct.pack("=Qi", granted, file)
            _check_result(_call_kernel(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0))
            os.close(file)
    _check_result(_load_libc().prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    _check_result(_call_kernel(_RESTRICT_SELF, ruleset, 0))
    os.close(ruleset)


def main(argv: Sequence[str] | None = None) -> int:
    """Restrict this process and replace it by the command. Returns only on failure."""
    parser = argparse.ArgumentParser(prog="python -m privssl.site.sandbox")
    parser.add_argument("--read", type=Path, action="append", default=[])
    parser.add_argument("--write", type=Path, action="append", default=[])
    parser.add_argument("--parent", type=int, metavar="PID", help="end when this process does")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(argv)
    devices = [path for path in map(Path, DEVICES) if path.exists()]
    try:
        if options.parent is not None:
            _end_with_parent(options.parent)
        restrict([*readable(), *options.read], [*devices, *options.write])
        os.execvp(options.command[0], options.command)
    except OSError as error:
        print(f"{options.command[0]} was not started: {error}", file=sys.stderr)
    return 2


def _end_with_parent(parent: int) -> None:
    """Send SIGTERM to this process, and so to the command, when the parent ends."""
    _check_result(_load_libc().prctl(_PARENT_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0))
    if os.getppid() != parent:
        raise OSError(f"its parent process {parent} has ended")


def _load_libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _call_kernel(number: int, *arguments: object) -> int:
    result: int = _load_libc().syscall(number, *arguments)
    return result


def _check_result(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


if __name__ == "__main__":
    sys.exit(main())
