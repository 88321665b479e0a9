"""Check a root certificate and the TLS connection to a SuperLink before Flower is started.

Flower reports a failed connection only as unavailable, or retries for ever. This module sends no
message of a run.
"""

import os
import socket
import ssl
import time
from pathlib import Path

from privssl.errors import ConfigError

HANDSHAKE_SECONDS = 10.0
DAY = 86400.0
WARNING_DAYS = 14  # before a certificate expires

#: Advice by OpenSSL's reason to refuse a certificate (X509_V_ERR_...).
_ADVICE = {
    9: "Check the clocks of both machines",
    10: "Whoever runs the SuperLink must renew it",
    62: "Use the host name in the certificate",
    64: "Use the address in the certificate",
}
NOBODY = "nobody answers"  # beginning of ``probe``'s result without a server
_WRONG_ROOT = "Get the root certificate of this SuperLink from whoever runs it"


def check_root(path: Path, now: float | None = None) -> str:
    """Check a root certificate (PEM) at the Unix time ``now``.

    Returns a warning if it expires soon, else an empty string. Raises ConfigError if it is
    unreadable, not of a certificate authority, or not valid.
    """
    now = time.time() if now is None else now
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    advice = "Give the root certificate of the SuperLink (PEM), ca.crt"
    try:
        context.load_verify_locations(cafile=os.fspath(path))
    except ssl.SSLError:
        raise ConfigError(f"{path}: not a certificate. {advice}") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}. {advice}") from None
    roots = context.get_ca_certs()
    if not roots:
        raise ConfigError(f"{path}: a server's certificate, not its authority's. {advice}")
    valid_from = min(ssl.cert_time_to_seconds(str(root["notBefore"])) for root in roots)
    valid_until = max(ssl.cert_time_to_seconds(str(root["notAfter"])) for root in roots)
    day = time.strftime("%Y-%m-%d", time.gmtime(valid_from if now < valid_from else valid_until))
    if now < valid_from:
        raise ConfigError(f"{path}: not valid before {day}. Check the clock of this machine")
    if now > valid_until:
        raise ConfigError(f"{path}: expired on {day}. Get a new one from the SuperLink's operator")
    if now > valid_until - WARNING_DAYS * DAY:
        return f"{path}: expires on {day}. Ask the SuperLink's operator for a new one"
    return ""


def probe(superlink: str, certificate: str) -> str:
    """Return why this machine cannot connect to a SuperLink (host:port); empty if it can.

    ``certificate``: the root certificate; empty: without TLS.
    """
    host, _, port = superlink.rpartition(":")
    host = host.strip("[]")
    try:
        if certificate:
            check_root(Path(certificate))
        with socket.create_connection((host, int(port)), timeout=HANDSHAKE_SECONDS) as wire:
            return _find_handshake_problem(wire, superlink, host, certificate)
    except ConfigError as error:
        return str(error)
    except (OSError, UnicodeError) as error:  # UnicodeError: an impossible host name
        return f"{NOBODY} at {superlink} ({getattr(error, 'strerror', None) or error})"


def _find_handshake_problem(
    wire: socket.socket, superlink: str, host: str, certificate: str
) -> str:
    if certificate:
        context = ssl.create_default_context(cafile=certificate)
    else:  # only to test whether it speaks TLS
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        context.wrap_socket(wire, server_hostname=host).close()
    except ssl.SSLCertVerificationError as error:
        return (
            f"the certificate of the SuperLink at {superlink} is refused by {certificate}: "
            f"{error.verify_message.rstrip('.')}. {_ADVICE.get(error.verify_code, _WRONG_ROOT)}"
        )
    except OSError:
        if not certificate:
            return ""
        return (
            f"the server at {superlink} does not speak TLS. Whoever runs the SuperLink must start "
            "it with its certificate"
        )
    if certificate:
        return ""
    return (
        f"the SuperLink at {superlink} speaks TLS. Give its root certificate (--certificate of a "
        "site, run.certificate of a coordinator)"
    )
