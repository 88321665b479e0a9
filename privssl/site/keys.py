"""``python -m privssl.site.keys FOLDER --host HOST NAME ...``: test keys and certificates.

Writes the certificate of a new private authority (``ca.crt``), the SuperLink's certificate and key
(``link.crt``, ``link.key``) and for each agent a P-384 key pair in OpenSSH's format (``NAME``,
``NAME.pub``). The authority's key is discarded: a new certificate needs a new folder.

The SuperLink's certificate is for HOST and for 127.0.0.1, to which its own processes connect.
"""

import argparse
import ipaddress
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

try:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives import serialization as formats
    from cryptography.hazmat.primitives.asymmetric import ec
except ImportError:  # Flower depends on it
    x509 = None

from accounting.account_plan import check_agent_id
from accounting.errors import PlanError
from privssl.errors import UserError
from privssl.runtime.process import private_umask
from privssl.storage import atomic_files

LOOPBACK = "127.0.0.1"  # the address by which a SuperLink on 0.0.0.0 connects to itself
DAYS = 90
MOST_DAYS = 36_500


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status: 0, or 2 after a user's mistake."""
    parser = argparse.ArgumentParser(
        prog="python -m privssl.site.keys", description="Create test keys and certificates."
    )
    parser.add_argument("folder", type=Path, help="a new folder")
    parser.add_argument("names", nargs="+", metavar="NAME", help="agents: s0 s1 q0 ...")
    parser.add_argument(
        "--host",
        default=LOOPBACK,
        help="host of the SuperLink, as sites reach it (default 127.0.0.1, which is always added)",
    )
    parser.add_argument("--days", type=int, default=DAYS, help=f"validity (default {DAYS})")
    options = parser.parse_args(argv)
    try:
        make(options.folder, options.host, options.names, options.days)
    except (UserError, PlanError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"Made in {options.folder}. Give each site its own key, and ca.crt.")
    return 0


def make(folder: Path, host: str, names: Sequence[str], days: int = DAYS) -> None:
    """Write all files, readable by their owner alone.

    Raises:
        UserError: the folder exists, a name or number is wrong, or cryptography is missing.
        accounting.errors.PlanError: a name cannot be an agent's.
    """
    for name in names:
        check_agent_id(name)
    if duplicates := [name for name, times in Counter(names).items() if times > 1]:
        raise UserError(f"{', '.join(duplicates)}: named twice. Name each agent once")
    if not 1 <= days <= MOST_DAYS:
        raise UserError(f"--days {days}: give 1 to {MOST_DAYS}")
    if x509 is None:
        raise UserError(
            "The cryptography package is not installed. Install it: pip install 'privssl[flower]'"
        )
    try:
        folder.mkdir(parents=True, mode=0o700)
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}. Give a new folder") from None
    valid_from = datetime.now(timezone.utc) - timedelta(minutes=1)
    dates = valid_from, valid_from + timedelta(days=days)
    authority, link = new_key(), new_key()
    with private_umask(), atomic_files.writing(folder):
        (folder / "ca.crt").write_bytes(certificate(authority, authority, dates))
        (folder / "link.crt").write_bytes(certificate(link, authority, dates, host, LOOPBACK))
        (folder / "link.key").write_bytes(private_bytes(link, "PKCS8"))
        for name in names:
            key = new_key()
            public = key.public_key().public_bytes(
                formats.Encoding.OpenSSH, formats.PublicFormat.OpenSSH
            )
            (folder / name).write_bytes(private_bytes(key, "OpenSSH"))
            (folder / f"{name}.pub").write_bytes(public + f" {name}\n".encode())


def new_key() -> Any:
    """Create a private P-384 key."""
    return ec.generate_private_key(ec.SECP384R1())


def private_bytes(key: Any, form: str) -> bytes:
    """Encode a private key without a password; ``form`` is PKCS8 or OpenSSH."""
    data: bytes = key.private_bytes(
        formats.Encoding.PEM, getattr(formats.PrivateFormat, form), formats.NoEncryption()
    )
    return data


def certificate(key: Any, authority: Any, dates: tuple[datetime, datetime], *hosts: str) -> bytes:
    """Create a certificate (PEM) signed by the authority's key.

    Args:
        dates: begin and end of its validity.
        hosts: names or addresses of a server; none: the authority's own certificate.
    """
    root = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "privssl sites")])
    subject = root
    if hosts:
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, hosts[0][:64])])
    builder = x509.CertificateBuilder(
        root, subject, key.public_key(), x509.random_serial_number(), *dates
    )
    # Python 3.13 and later require key identifiers.
    extensions = [
        x509.BasicConstraints(ca=not hosts, path_length=None),
        x509.SubjectKeyIdentifier.from_public_key(key.public_key()),
        x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()),
    ]
    if hosts:
        extensions.append(
            x509.SubjectAlternativeName(list(map(_convert_host, dict.fromkeys(hosts))))
        )
        extensions.append(x509.ExtendedKeyUsage([x509.ExtendedKeyUsageOID.SERVER_AUTH]))
    else:  # only key_cert_sign
        extensions.append(x509.KeyUsage(*(bit == 5 for bit in range(9))))
    for extension in extensions:
        critical = isinstance(extension, x509.BasicConstraints | x509.KeyUsage)
        builder = builder.add_extension(extension, critical=critical)
    pem: bytes = builder.sign(authority, hashes.SHA384()).public_bytes(formats.Encoding.PEM)
    return pem


def _convert_host(host: str) -> Any:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


if __name__ == "__main__":
    sys.exit(main())
