"""``python -m privssl.export RUN --onnx FILE | --torch-export FILE``: write a classifier.

The file takes rows (B, *shape) as ``Run.network_input`` makes them, returns logits (B, classes),
for any B. It is written only if its outputs agree with those of the classifier on synthetic rows.
Exit status: 0 written, 2 the user's mistake, 130 interrupted.
"""

import argparse
import io
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from rich.console import Console

from privssl.errors import ConfigError, RunFolderError, UserError, first_line
from privssl.predict import add_run_arguments
from privssl.runtime.command import run_command

if TYPE_CHECKING:
    from torch import Tensor, nn

TOLERANCE = 1e-4  # largest difference of a logit, relative to the largest logit if that is above 1
ROWS = 5  # that are tried; the network is traced with another number

Written: TypeAlias = "tuple[bytes, Callable[[Tensor], Tensor]]"  # the file, and what it computes


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m privssl.export",
        description="Write the classifier of a finished run for other programs.",
    )
    add_run_arguments(parser)
    form = parser.add_mutually_exclusive_group(required=True)
    form.add_argument("--onnx", type=Path, metavar="FILE", help="needs pip install 'privssl[onnx]'")
    form.add_argument("--torch-export", type=Path, metavar="FILE", help="read by torch.export.load")
    options = parser.parse_args(argv)
    return run_command(partial(_export, options), json=False, interrupted="Interrupted.")


def _export(options: argparse.Namespace, console: Console, _: ExitStack) -> int:
    from privssl.api.run import open_run
    from privssl.runs.model_card import scaling_of
    from privssl.runtime.process import in_one_thread
    from privssl.storage import atomic_files

    in_one_thread()
    output = options.onnx or options.torch_export
    if output.exists() or output.is_symlink():
        raise RunFolderError(f"{output} exists. Choose another file")
    run = open_run(options.run, options.model, options.plugin)
    network = run.classifier()  # which refuses folders without "rows"
    rows = run.results["rows"]
    shape, columns = tuple(rows["shape"]), rows.get("columns")
    about = {
        "class_names": "\n".join(run.class_names), "shape": "x".join(map(str, shape)),
        "scaling": scaling_of(rows), **({"columns": json.dumps(columns)} if columns else {}),
    }  # fmt: skip
    write = as_onnx if options.onnx else as_torch_export
    written, apart = checked(write, network, shape, about)
    with atomic_files.writing(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        atomic_files.replace(output, written)
    console.print(
        f"{output}: rows (B, {', '.join(map(str, shape))}), {about['scaling']}, to logits "
        f"(B, {len(run.class_names)}). Largest difference on {ROWS} rows: {apart:.1e}.",
        markup=False,
    )
    return 0


def checked(
    write: "Callable[[nn.Module, tuple[int, ...], dict[str, str]], Written]",
    network: "nn.Module",
    shape: tuple[int, ...],
    about: dict[str, str],
) -> tuple[bytes, float]:
    """A network's file, and the largest difference of its logits, over 1 or the largest logit.

    Args:
        write: ``as_onnx`` or ``as_torch_export``.
        network: in evaluation mode, on the CPU; it takes rows of ``shape``.
        about: texts that the file says of its rows.

    Raises:
        UserError: the network cannot be written in this form, or its outputs differ.
    """
    import torch

    rng = torch.Generator().manual_seed(0)
    x = torch.rand(ROWS, *shape, generator=rng) * 2 - 1
    with torch.no_grad():
        expected = network(x)
        try:
            written, compute = write(network, shape, about)
            found = compute(x)
        except UserError:
            raise
        except Exception as error:  # of tracing, which has many
            raise UserError(
                f"{type(network).__name__} cannot be exported: {type(error).__name__}: "
                f"{first_line(error)}. Its forward may use tensor operations alone, and no branch "
                "on their values"
            ) from error
    scale = max(1.0, float(expected.abs().max()))
    apart = float((found - expected).abs().max()) / scale if found.shape == expected.shape else 9.9
    if not apart <= TOLERANCE:  # NaN too
        raise UserError(
            f"The exported network differs from {type(network).__name__} by {apart:.1e} (at most "
            f"{TOLERANCE}), so it was not written. Its forward may depend on more than its input"
        )
    return written, apart


def as_torch_export(network: "nn.Module", shape: tuple[int, ...], about: dict[str, str]) -> Written:
    """The file that ``torch.export.load`` reads, with ``about`` in ``extra_files``."""
    import torch

    buffer = io.BytesIO()
    torch.export.save(_traced(network, shape), buffer, extra_files=dict(about))
    buffer.seek(0)
    program = torch.export.load(buffer)
    return buffer.getvalue(), program.module()


def as_onnx(network: "nn.Module", shape: tuple[int, ...], about: dict[str, str]) -> Written:
    """An ONNX file: input ``x``, output ``logits``, ``about`` in its metadata."""
    try:
        import onnx
        import onnxruntime
        import onnxscript  # noqa: F401  (torch.onnx needs it)
    except ImportError as error:
        raise ConfigError(
            f"--onnx needs {error.name}: pip install onnx onnxscript onnxruntime (the extra "
            "privssl[onnx])"
        ) from None
    import torch

    traced = _traced(network, shape)
    program: Any = torch.onnx.export(
        traced, input_names=["x"], output_names=["logits"], verbose=False, dynamo=True
    )
    model = program.model_proto
    onnx.helper.set_model_props(model, about)
    written = model.SerializeToString()
    session = onnxruntime.InferenceSession(written, providers=["CPUExecutionProvider"])
    return written, lambda x: torch.from_numpy(session.run(None, {"x": x.numpy()})[0])


def _traced(network: "nn.Module", shape: tuple[int, ...]) -> Any:
    """The network as a graph for any number of rows, without paths and source of this machine."""
    import torch

    from privssl.models.static_norm import as_batch_norms

    network = as_batch_norms(network).to(memory_format=torch.contiguous_format)
    rows = torch.zeros(3, *shape)
    dynamic = ({0: torch.export.Dim("rows")},)
    program = torch.export.export(network, (rows,), dynamic_shapes=dynamic)
    for node in program.graph.nodes:  # of each, which lines of which files made it
        node.meta.pop("stack_trace", None)
    return program


if __name__ == "__main__":
    sys.exit(main())
