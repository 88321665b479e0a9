"""Agents' names pinned to the public keys of their sites.

A site states its own name. The coordinator therefore keeps a folder with the public key of each
agent (NAME.pub, in OpenSSH's format) and accepts a name only from the node whose key the
SuperLink verified. The keys are compared as text in Flower's format (PEM).
"""

from collections.abc import Iterable
from pathlib import Path

from privssl.errors import ConfigError


class NodeKeys:
    """Public keys of agents."""

    def __init__(self, folder: Path, names: Iterable[str]) -> None:
        """Read FOLDER/NAME.pub for these agents.

        Raises ConfigError if one is missing or not such a key, or if two agents have the same key.
        """
        self.files = {name: folder.expanduser().resolve() / f"{name}.pub" for name in names}
        self._owner: dict[str, str] = {}
        for name, path in self.files.items():
            if (other := self._owner.setdefault(_read_pem(path), name)) != name:
                raise ConfigError(f"{path}: also the key of {other}. Give each site its own key")

    def owner(self, pem: str) -> str:
        """Return the agent with this key (PEM); empty if there is none."""
        return self._owner.get(pem, "")


def _read_pem(path: Path) -> str:
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
        from cryptography.hazmat.primitives.serialization import (
            Encoding,
            PublicFormat,
            load_ssh_public_key,
        )
    except ImportError:
        raise ConfigError(
            "run.keys needs the cryptography package. Install it: pip install 'privssl[flower]'"
        ) from None
    try:
        key = load_ssh_public_key(path.read_bytes())
        if not isinstance(key, EllipticCurvePublicKey):
            raise ValueError("another kind of key")
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}. run.keys needs the public key of each site, NAME.pub"
        ) from None
    except (ValueError, UnsupportedAlgorithm):
        raise ConfigError(
            f"{path}: not a public ECDSA key in OpenSSH's format. Make one with python -m "
            "privssl.site.keys or ssh-keygen -t ecdsa"
        ) from None
    pem: bytes = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return pem.decode()
