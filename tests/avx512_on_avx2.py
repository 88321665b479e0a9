"""Tests the AVX-512 code of the kernels on a processor that has only AVX2: ``make test-avx512``.

    python tests/avx512_on_avx2.py [TEST_FILE ...]

Nearly all of a kernel uses the compiler's vectors, which become several shorter ones on such a
processor. The few instructions that a kernel names are plain loops in ``avx512_on_avx2.hpp``. A
copy of the checkout is compiled as if for AVX-512, and the tests of kernels run in it. This cannot
show whether the compiler generates correct code for AVX-512 itself: every private run checks that
(privssl/ops/self_test.py).
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
FLAGS = f"-include {ROOT / 'tests' / 'avx512_on_avx2.hpp'} -Wno-psabi"
#: setup.py skips a kernel that does not compile; then torch's code would be tested instead.
CHECK = """
from privssl.ops import dispatch
assert dispatch.generation() == "avx2", f"not compiled: {dispatch.versions('avx2')}"
for name in dispatch.VERSIONS:
    assert dispatch.library(name, "avx2").as_for_avx512(), name
"""


def main(tests: list[str]) -> int:
    """Exit status of pytest."""
    with tempfile.TemporaryDirectory() as folder:
        there = Path(folder, "privssl")
        for name in _files():
            (there / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, there / name)

        def run(*arguments: str, **environment: str) -> int:
            variables = {**os.environ, "PYTHONPATH": str(there), **environment}
            command = [sys.executable, *arguments]
            return subprocess.run(command, cwd=there, env=variables, check=False).returncode

        build = ("setup.py", "--quiet", "build_ext", "--inplace", f"--parallel={os.cpu_count()}")
        # the name of the flags depends on the version of setuptools
        status = run(*build, CFLAGS=FLAGS, CXXFLAGS=FLAGS)
        for other in there.glob("privssl/ops/_*_avx512.*"):
            other.unlink()  # a processor with AVX-512 would use these
        status = status or run("-c", CHECK)
        return status or run("-m", "pytest", *(tests or _of_kernels()))


def _files() -> list[str]:
    """Files of the checkout, committed or not."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True)
    return [name for name in names.stdout.splitlines() if (ROOT / name).exists()]


def _of_kernels() -> list[str]:
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    about = re.compile("kernels|privssl[.]ops|each_generation")
    return [str(file.relative_to(ROOT)) for file in files if about.search(file.read_text())]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
