"""TLS to a SuperLink, as far as a person has to mend something: what is wrong, and with what.

Flower's programs say that a connection is unavailable, or try again for ever without a word. So
both sides look themselves, with the standard library, before they start one: ``check_root`` at
the certificate that they were given, ``probe`` at the SuperLink, by a handshake that asks for
nothing. Nothing here carries a letter.
"""

import os
import socket
import ssl
import time
from pathlib import Path

from privssl.errors import ConfigError

SECONDS = 10.0  # for a handshake
DAY = 86400.0
SOON = 14  # days before it expires in which a certificate is spoken of

#: Of the reasons why OpenSSL does not believe a certificate (X509_V_ERR_...), those that a person
#: can tell apart: who has to do something, and what.
_NOT_YET, _EXPIRED, _HOST, _ADDRESS = 9, 10, 62, 64
_NOT_SIGNED = (18, 19, 20, 21)


def check_root(path: Path, now: float | None = None) -> str:
    """Look at the root certificate that one was given.

    Args:
        now: Unix time.

    Returns:
        A warning where it expires soon, else nothing.

    Raises:
        ConfigError: it cannot be read, is no certificate of an authority, or has expired.
    """
    now = time.time() if now is None else now
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(cafile=os.fspath(path))
    except ssl.SSLError:
        raise ConfigError(
            f"{path}: not a certificate. Give the root certificate of the SuperLink (PEM), ca.crt"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}. Give the root certificate of the SuperLink"
        ) from None
    roots = context.get_ca_certs()
    if not roots:
        raise ConfigError(
            f"{path}: the certificate of a server, not of the authority that signed it. Give the "
            "root certificate, ca.crt"
        )
    begins = min(ssl.cert_time_to_seconds(str(root["notBefore"])) for root in roots)
    ends = max(ssl.cert_time_to_seconds(str(root["notAfter"])) for root in roots)
    if now > ends:
        raise ConfigError(
            f"{path}: expired on {_day(ends)}. Get the new one from whoever runs the SuperLink"
        )
    if now < begins:
        raise ConfigError(
            f"{path}: not valid before {_day(begins)}. Look at the clock of this machine"
        )
    if now > ends - SOON * DAY:
        return f"{path} expires on {_day(ends)}. Ask whoever runs the SuperLink for the next one"
    return ""


def probe(superlink: str, certificate: str) -> str:
    """What keeps this machine from speaking with a SuperLink; empty: nothing does.

    Args:
        superlink: host:port.
        certificate: root certificate; empty: without TLS.
    """
    host, _, port = superlink.rpartition(":")
    host = host.strip("[]")
    try:
        if certificate:
            check_root(Path(certificate))
    except ConfigError as error:  # since it was looked at first
        return str(error)
    try:
        with socket.create_connection((host, int(port)), timeout=SECONDS) as line:
            return _handshake(line, superlink, host, certificate)
    except (OSError, UnicodeError) as error:  # the second: a name that cannot be one
        return f"nobody answers at {superlink} ({getattr(error, 'strerror', None) or error})"


def _handshake(line: socket.socket, superlink: str, host: str, certificate: str) -> str:
    if certificate:
        context = ssl.create_default_context(cafile=certificate)
    else:  # only to see whether it would speak TLS
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with context.wrap_socket(line, server_hostname=host):
            pass
    except ssl.SSLCertVerificationError as error:
        return f"the SuperLink at {superlink} {_explain_failure(error, host, certificate)}"
    except OSError:
        if not certificate:
            return ""
        return (
            f"what answers at {superlink} does not speak TLS, so that letters would cross in "
            "clear. Whoever runs the SuperLink must start it with its certificate"
        )
    if certificate:
        return ""
    return (
        f"the SuperLink at {superlink} speaks TLS. Give its root certificate (--certificate of a "
        "site, run.certificate of a coordinator)"
    )


def _explain_failure(error: ssl.SSLCertVerificationError, host: str, certificate: str) -> str:
    if error.verify_code == _EXPIRED:
        return "has a certificate that has expired. Whoever runs it must renew the certificate"
    if error.verify_code == _NOT_YET:
        return "has a certificate that is not valid yet. Look at the clocks of both machines"
    if error.verify_code in (_HOST, _ADDRESS):
        return (
            f"has a certificate for another host than {host}. Call it by the name in its "
            "certificate"
        )
    if error.verify_code in _NOT_SIGNED:
        return (
            f"has a certificate that {certificate} did not sign. Get the root certificate of this "
            "very SuperLink from whoever runs it, by a way that you trust"
        )
    return f"has a certificate that is not believed: {error.verify_message}"


def _day(seconds: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(seconds))
