"""Compiles privssl/csrc, where it can be; everything else about the project is in setup.cfg.

Each kernel is made for several generations of processors, and privssl takes the one that fits. What
does not compile, for want of a compiler or on a processor of another kind, is left out: torch's
kernels then do the work.
"""

import copy
import shutil
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

#: As privssl/ops/dispatch.py knows them.
INSTRUCTION_SETS = {
    "avx2": ["-march=x86-64-v3"],
    "avx512": ["-march=x86-64-v4"],
}
FLAGS = ["-std=c++20", "-O3", "-fno-math-errno"]
#: A compiler that carries inputs of one turn of a loop over to the next runs out of registers; and
#: views have the same bits as torch's only where products and sums are rounded one by one.
KERNELS = {
    "pooled": ["-ffp-contract=fast", "-fno-predictive-commoning"],
    "correlation": ["-ffp-contract=fast", "-fno-predictive-commoning"],
    "clipping": ["-ffp-contract=fast"],
    "views": ["-ffp-contract=off", "-fno-trapping-math"],
    "noise": ["-ffp-contract=fast", "-fno-trapping-math"],
}


class BuildKernels(build_ext):
    """Kernels compile side by side (setup.cfg), two of them from each source."""

    def build_extension(self, ext: Extension) -> None:
        """Compile one, in a folder of its own: objects are named by their source.

        A checkout that has it, newer than its sources, compiles nothing: `make test` after
        `make train` installs again.
        """
        in_checkout = Path(self.get_ext_filename(ext.name))
        sources = map(Path, (*ext.sources, *ext.depends))
        if not self.force and in_checkout.is_file():
            target = Path(self.get_ext_fullpath(ext.name))
            changed = max(source.stat().st_mtime for source in sources)
            if in_checkout.stat().st_mtime > changed:
                if target.resolve() != in_checkout.resolve():
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(in_checkout, target)
                return
        alone = copy.copy(self)
        alone.build_temp = str(Path(self.build_temp, ext.name))
        super(BuildKernels, alone).build_extension(ext)


setup(
    cmdclass={"build_ext": BuildKernels},
    ext_modules=[
        Extension(
            f"privssl.ops._{kernel}_{name}",
            [f"privssl/csrc/{kernel}.cpp"],
            depends=["setup.py", *sorted(map(str, Path("privssl/csrc").glob("*.hpp")))],
            extra_compile_args=[*FLAGS, *special, *processor],
            language="c++",
            optional=True,
        )
        for kernel, special in KERNELS.items()
        for name, processor in INSTRUCTION_SETS.items()
    ],
)
