"""``python -m privssl.site.keys FOLDER --host HOST NAME ...``: keys and certificates for a trial.

A private authority, the certificate of a SuperLink that it signs, and for each site a key pair
(P-384 in OpenSSH's form, as Flower asks for): ``ca.crt``, ``link.crt``, ``link.key``, ``NAME``,
``NAME.pub``. The authority's own key is thrown away: a new certificate means a new folder. Made
by ``openssl`` and ``ssh-keygen``.
"""

import argparse
import ipaddress
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from accounting.account_plan import check_agent_id
from accounting.errors import PlanError
from privssl.errors import UserError
from privssl.runtime.process import private_umask

DAYS = 90
MOST_DAYS = 36_500  # openssl would take years beyond 9999


def main(argv: Sequence[str] | None = None) -> int:
    """Make the files; returns the exit status: 0, or 2 for what the user can mend."""
    parser = argparse.ArgumentParser(prog="python -m privssl.site.keys")
    parser.add_argument("folder", type=Path, help="made here; must not exist")
    parser.add_argument("names", nargs="+", metavar="NAME", help="agents: s0 s1 q0 ...")
    parser.add_argument("--host", default="127.0.0.1", help="of the SuperLink, as sites call it")
    parser.add_argument("--days", type=int, default=DAYS, help="until certificates expire")
    options = parser.parse_args(argv)
    try:
        with private_umask():
            make(options.folder, options.host, options.names, options.days)
    except (UserError, PlanError) as problem:
        print(problem, file=sys.stderr)
        return 2
    print(f"Made in {options.folder}. Give each site its own key, and ca.crt.")
    return 0


def make(folder: Path, host: str, names: Sequence[str], days: int = DAYS) -> None:
    """Write all files, readable by their owner alone.

    Raises:
        UserError: the folder exists, or a program is missing or refuses.
        accounting.errors.PlanError: a name cannot be an agent's.
    """
    for name in names:
        check_agent_id(name)
    if doubled := [name for name, times in Counter(names).items() if times > 1]:
        raise UserError(f"{', '.join(doubled)}: named twice. Name each agent once")
    if not 1 <= days <= MOST_DAYS:
        raise UserError(f"--days {days}: give 1 to {MOST_DAYS}")
    for program in ("openssl", "ssh-keygen"):
        if shutil.which(program) is None:
            raise UserError(f"{program} is not installed. Install it as this system does")
    try:
        folder.mkdir(parents=True, mode=0o700)
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}. Give a folder that is not there") from None
    with tempfile.TemporaryDirectory() as scratch:
        key, request, extra = (Path(scratch) / name for name in ("ca.key", "link.csr", "extra"))
        # Key identifiers: Python 3.13 asks for them.
        extra.write_text(
            f"subjectAltName={_alternative(host)}\nextendedKeyUsage=serverAuth\n"
            "basicConstraints=critical,CA:FALSE\nkeyUsage=critical,digitalSignature\n"
            "subjectKeyIdentifier=hash\nauthorityKeyIdentifier=keyid\n"
        )
        _curve_key(key)
        _openssl(
            "req", "-x509", "-new", "-key", key, "-sha384", "-days", days, "-subj",
            "/CN=privssl sites", "-out", folder / "ca.crt",
            "-addext", "keyUsage=critical,keyCertSign",
            "-addext", "basicConstraints=critical,CA:TRUE",
        )  # fmt: skip
        _curve_key(folder / "link.key")
        link = folder / "link.key"
        _openssl("req", "-new", "-key", link, "-subj", f"/CN={host}", "-out", request)
        _openssl(
            "x509", "-req", "-in", request, "-CA", folder / "ca.crt", "-CAkey", key, "-sha384",
            "-CAcreateserial", "-days", days, "-extfile", extra, "-out", folder / "link.crt",
        )  # fmt: skip
    (folder / "ca.srl").unlink(missing_ok=True)
    for name in names:
        kind = ("-q", "-t", "ecdsa", "-b", 384, "-N", "", "-C", name)
        _run("ssh-keygen", *kind, "-f", folder / name)


def _alternative(host: str) -> str:
    try:
        return f"IP:{ipaddress.ip_address(host)}"
    except ValueError:
        return f"DNS:{host}"


def _curve_key(path: Path) -> None:
    _openssl("genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-384", "-out", path)


def _openssl(*arguments: object) -> None:
    _run("openssl", *arguments)


def _run(program: str, *arguments: object) -> None:
    done = subprocess.run(
        [program, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise UserError(f"{program} {arguments[0]}: {done.stderr.strip()[-300:]}")


if __name__ == "__main__":
    sys.exit(main())
