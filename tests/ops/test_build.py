"""How ``setup.py`` compiles the kernels. That they compute the same as torch is tested for each
kernel.
"""

import importlib
import os
import runpy
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest

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


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, Any]:
    """What setup.py gives to setuptools, in a checkout without compiled kernels."""
    checkout = tmp_path / "checkout"
    shutil.copytree(SETUP.parent / "privssl" / "csrc", checkout / "privssl" / "csrc")
    shutil.copy(SETUP, checkout)
    monkeypatch.chdir(checkout)
    with patch.object(setuptools, "setup") as setup:
        runpy.run_path(str(SETUP))
    found: Mapping[str, Any] = setup.call_args.kwargs
    return found


def test_kernels_compiled_in_parallel_never_share_an_object_file(
    arguments: Mapping[str, Any], tmp_path: Path
) -> None:
    own = objects(arguments, tmp_path)
    assert len(set(own)) == len(own) == 10  # five kernels, two instruction sets
    assert len(set(objects({**arguments, "cmdclass": {}}, tmp_path))) == 5  # the control


def test_only_kernels_older_than_a_source_are_compiled_again(
    arguments: Mapping[str, Any], tmp_path: Path
) -> None:
    build = setuptools.Distribution(arguments).get_command_obj("build_ext")
    build.ensure_finalized()
    Path("privssl/ops").mkdir()
    compiled = [Path(build.get_ext_filename(each.name)) for each in build.extensions]
    for number, path in enumerate(compiled):
        path.write_text(f"{number}")
        os.utime(path, (2e9, 2e9))
    assert objects(arguments, tmp_path) == []
    assert [(tmp_path / path).read_text() for path in compiled] == list("0123456789")
    os.utime("privssl/csrc/noise.cpp", (3e9, 3e9))  # the control
    assert len(objects(arguments, tmp_path)) == 2
    os.utime("setup.py", (3e9, 3e9))
    assert len(objects(arguments, tmp_path)) == 10
