"""Whose key it is: names of agents pinned to the keys of their sites.

A site says its own name, and one that is registered could say another's. So whoever runs the
coordinator has a folder with the public key of each agent, NAME.pub as ``privssl.site.keys`` and
``ssh-keygen`` write it, got from each operator by a way that both trust. Who speaks is then
known by the key that the SuperLink has seen it sign with, and a name is believed of one key.

Nothing that comes from outside is parsed: our files are written out as Flower writes keys (PEM),
and texts are compared.
"""

import base64
import binascii
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path

from privssl.errors import ConfigError

#: What stands before the point in a SubjectPublicKeyInfo (RFC 5480), by OpenSSH's name of a curve.
_BEFORE_POINT = {
    "ecdsa-sha2-nistp256": "3059301306072a8648ce3d020106082a8648ce3d030107034200",
    "ecdsa-sha2-nistp384": "3076301006072a8648ce3d020106052b81040022036200",
    "ecdsa-sha2-nistp521": "30819b301006072a8648ce3d020106052b8104002303818600",
}


class NodeKeys:
    """Public keys of agents, read."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        """
        Args:
            files: agent -> its public key in OpenSSH's form.

        Raises:
            ConfigError: one is missing or not such a key, or two agents have the same.
        """
        self.files = dict(files)
        self._owner: dict[str, str] = {}
        for name, path in self.files.items():
            if (other := self._owner.setdefault(_pem(path), name)) != name:
                raise ConfigError(
                    f"{path} is the key of {other} as well. Each site needs a key of its own"
                )

    def owner(self, pem: str) -> str:
        """The agent whose key this is, as Flower writes keys; empty: nobody's."""
        return self._owner.get(pem, "")


def read_node_keys(folder: Path, names: Iterable[str]) -> NodeKeys:
    """The pins of these agents, from FOLDER/NAME.pub. Raises ConfigError."""
    return NodeKeys({name: folder.expanduser().resolve() / f"{name}.pub" for name in names})


def _pem(path: Path) -> str:
    """A public key file, ``ecdsa-sha2-nistp384 BASE64 COMMENT``, in Flower's form."""
    try:
        words = path.read_text(encoding="ascii").split()
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}. run.keys needs the public key of each site, NAME.pub"
        ) from None
    except UnicodeDecodeError:
        words = []
    try:
        kind, blob = words[0], base64.b64decode(words[1], validate=True)
        content = bytes.fromhex(_BEFORE_POINT[kind]) + _last_part(blob)
    except (LookupError, binascii.Error):
        raise ConfigError(
            f"{path}: not a public key as ssh-keygen -t ecdsa writes it. python -m "
            "privssl.site.keys makes pairs"
        ) from None
    lines = textwrap.wrap(base64.b64encode(content).decode(), 64)
    return "\n".join(["-----BEGIN PUBLIC KEY-----", *lines, "-----END PUBLIC KEY-----", ""])


def _last_part(blob: bytes) -> bytes:
    """The point of a key: the third of its parts, each behind its length (RFC 4251)."""
    for _ in range(2):
        blob = blob[4 + int.from_bytes(blob[:4], "big") :]
    if not blob or len(blob) != 4 + int.from_bytes(blob[:4], "big"):
        raise LookupError("cut off")
    return blob[4:]
