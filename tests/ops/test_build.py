"""How ``setup.py`` compiles the kernels. That they compute the same as torch is tested for each
kernel.
"""

import importlib
import runpy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

setuptools: Any = importlib.import_module("setuptools")
compilers: Any = importlib.import_module("distutils.ccompiler")  # as setuptools has it
SETUP = Path(__file__).parents[2] / "setup.py"


def objects(arguments: Mapping[str, Any], folder: Path) -> list[str]:
    """The object file of each kernel; no compiler is called."""
    made: list[str] = []

    def compile_(sources: Sequence[str], output_dir: str, **_: Any) -> list[str]:
        made.extend(str(Path(output_dir, source).with_suffix(".o")) for source in sources)
        return made[-len(sources) :]

    build = setuptools.Distribution(arguments).get_command_obj("build_ext")
    build.build_lib, build.build_temp = str(folder), str(folder / "temp")
    build.ensure_finalized()
    build.compiler = compilers.new_compiler()
    build.compiler.compile, build.compiler.link_shared_object = compile_, Mock()
    for extension in build.extensions:
        build.build_extension(extension)
    return made


def test_kernels_compiled_in_parallel_never_share_an_object_file(tmp_path: Path) -> None:
    with patch.object(setuptools, "setup") as setup:
        runpy.run_path(str(SETUP))
    arguments = setup.call_args.kwargs
    own = objects(arguments, tmp_path)
    assert len(set(own)) == len(own) == 10  # five kernels, two instruction sets
    assert len(set(objects({**arguments, "cmdclass": {}}, tmp_path))) == 5  # the control
