"""Where all noise that a claim rests on comes from: words of random bits that nobody can foretell.

OpenSSL makes them, which comes with Python (module ssl), by AES-256 in counter mode as NIST SP
800-90A has it. Google's differential-privacy library in C++ draws its noise from a function of the
same name, ``RAND_bytes``. Ours has OpenSSL seed itself anew before every draw, from the operating
system and with 32 more bytes of it. So nothing can be foretold from the state of the process, and
two copies of one draw other words as soon as the operating system gives them other bytes: a fork
always, a virtual machine that is woken twice from one picture where its system notices that
(Linux does by a virtual machine's generation ID). No seed reaches it; nothing stores or resumes it.

Why not the operating system's bytes alone: a step of DP-SGD needs 8 of them for every parameter,
and Linux makes them ten times as slowly.
"""

import os
import ssl

import numpy as np
from numpy.typing import NDArray

#: Other libraries that Python may be built with take no notice of what is mixed in.
_SEEDED_ANEW = ssl.OPENSSL_VERSION.startswith("OpenSSL ")
_AT_ONCE = 2**26  # bytes; OpenSSL gives no more than 2^31 - 1


def random_uint64(count: int) -> NDArray[np.uint64]:
    """``count`` words of 64 coins each, all independent and fair. Not to be written into.

    Raises:
        OSError, ssl.SSLError: the operating system, or OpenSSL, has no random bytes to give.
    """
    size = 8 * count
    if not _SEEDED_ANEW:
        return np.frombuffer(os.urandom(size), dtype=np.uint64)
    ssl.RAND_add(os.urandom(32), 0.0)  # 0.0: is not relied on where OpenSSL finds no other seed
    parts = [ssl.RAND_bytes(min(_AT_ONCE, size - at)) for at in range(0, size, _AT_ONCE)]
    return np.frombuffer(b"".join(parts), dtype=np.uint64)
