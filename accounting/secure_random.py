"""Random bits for all private noise. They have no seed and are never stored.

OpenSSL (module ssl) generates them by AES-256 in counter mode as in NIST SP 800-90A. It is reseeded
before every draw with 32 bytes of the operating system. So the state of the process predicts
nothing, and forks and virtual machines restored twice get different bits if the operating system
gives them different bytes. os.urandom alone is ten times slower, and a step of DP-SGD needs 8 bytes
for every parameter.
"""

import os
import ssl

import numpy as np
from numpy.typing import NDArray

#: Other TLS libraries that Python may be built with ignore RAND_add.
_IS_OPENSSL = ssl.OPENSSL_VERSION.startswith("OpenSSL ")
_MAX_BYTES = 2**26  # per call; OpenSSL gives at most 2^31 - 1


def random_uint64(count: int) -> NDArray[np.uint64]:
    """Return ``count`` words of 64 independent uniform bits, read-only.

    Raises:
        OSError, ssl.SSLError: the operating system or OpenSSL has no random bytes.
    """
    size = 8 * count
    if not _IS_OPENSSL:
        return np.frombuffer(os.urandom(size), dtype=np.uint64)
    ssl.RAND_add(os.urandom(32), 0.0)  # 0.0: not counted as entropy if OpenSSL has no other seed
    parts = [ssl.RAND_bytes(min(_MAX_BYTES, size - start)) for start in range(0, size, _MAX_BYTES)]
    return np.frombuffer(b"".join(parts), dtype=np.uint64)
