"""Tests what the kernels do with AVX-512 on a processor that has only AVX2: ``make test-avx512``.

    python tests/avx512_on_avx2.py [TEST_FILE ...]

Nearly all of a kernel is written in vectors of the compiler's, which makes several of a long one
where a processor has only shorter ones. The few instructions that a kernel names are plain loops in
``avx512_on_avx2.hpp``. So a copy of the checkout is compiled that holds itself for AVX-512, and the
tests that speak of kernels run in it. What this cannot show is whether the compiler makes the right
code of it for AVX-512 itself: every private run looks at that (privssl/ops/self_test.py).
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
#: A kernel that does not compile is left out by setup.py; torch's would then be what is tested.
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
        # which of the two names the flags go by depends on the version of setuptools
        status = run(*build, CFLAGS=FLAGS, CXXFLAGS=FLAGS)
        for other in there.glob("privssl/ops/_*_avx512.*"):
            other.unlink()  # where the processor has AVX-512, these would be taken
        status = status or run("-c", CHECK)
        return status or run("-m", "pytest", *(tests or _of_kernels()))


def _files() -> list[str]:
    """What is in the checkout, committed or not."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True)
    return [name for name in names.stdout.splitlines() if (ROOT / name).exists()]


def _of_kernels() -> list[str]:
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    about = re.compile("kernels|privssl[.]ops|each_generation")
    return [str(file.relative_to(ROOT)) for file in files if about.search(file.read_text())]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
