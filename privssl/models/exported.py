"""Networks as files for other programs, ONNX or torch.export, checked against the network."""

import io
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from privssl.errors import ConfigError, UserError, first_line
from privssl.models.static_norm import as_batch_norms

TOLERANCE = 1e-4  # largest difference of a logit, relative to the largest logit if that is above 1
ROWS = 5  # test rows; the network is traced with another number

Written: TypeAlias = tuple[bytes, Callable[[Tensor], Tensor]]  # file, and its function


def checked(
    write: Callable[[nn.Module, tuple[int, ...], dict[str, str]], Written],
    network: nn.Module,
    shape: tuple[int, ...],
    about: dict[str, str],
) -> tuple[bytes, float]:
    """Return a network's file, and the largest difference of its logits, relative to max(1, largest
    logit).

    Args:
        write: ``as_onnx`` or ``as_torch_export``.
        network: in evaluation mode, on the CPU; its rows have ``shape``.
        about: texts for the file's metadata.

    Raises:
        UserError: the network cannot be written in this form, or its outputs differ.
    """
    rng = torch.Generator().manual_seed(0)
    x = torch.rand(ROWS, *shape, generator=rng) * 2 - 1
    with torch.no_grad():
        expected = network(x)
        try:
            written, compute = write(network, shape, about)
            outputs = compute(x)
        except UserError:
            raise
        except Exception as error:  # tracing raises many types
            raise UserError(
                f"{type(network).__name__} cannot be exported: {type(error).__name__}: "
                f"{first_line(error)}. Its forward may use tensor operations alone, and no branch "
                "on their values"
            ) from error
    scale = max(1.0, float(expected.abs().max()))
    diff = (
        float((outputs - expected).abs().max()) / scale if outputs.shape == expected.shape else 9.9
    )
    if not diff <= TOLERANCE:  # NaN too
        raise UserError(
            f"The exported network differs from {type(network).__name__} by {diff:.1e} (at most "
            f"{TOLERANCE}), so it was not written. Its forward may depend on more than its input"
        )
    return written, diff


def as_torch_export(network: nn.Module, shape: tuple[int, ...], about: dict[str, str]) -> Written:
    """Return a file for ``torch.export.load``, with ``about`` in ``extra_files``."""
    buffer = io.BytesIO()
    torch.export.save(_trace_network(network, shape), buffer, extra_files=dict(about))
    buffer.seek(0)
    program = torch.export.load(buffer)
    return buffer.getvalue(), program.module()


def as_onnx(network: nn.Module, shape: tuple[int, ...], about: dict[str, str]) -> Written:
    """Return an ONNX file: input ``x``, output ``logits``, ``about`` in its metadata."""
    try:
        import onnx
        import onnxruntime
        import onnxscript  # noqa: F401  (torch.onnx needs it)
    except ImportError as error:
        raise ConfigError(
            f"--onnx needs {error.name}: pip install onnx onnxscript onnxruntime (the extra "
            "privssl[onnx])"
        ) from None
    traced = _trace_network(network, shape)
    program: Any = torch.onnx.export(
        traced, input_names=["x"], output_names=["logits"], verbose=False, dynamo=True
    )
    model = program.model_proto
    onnx.helper.set_model_props(model, about)
    written = model.SerializeToString()
    session = onnxruntime.InferenceSession(written, providers=["CPUExecutionProvider"])
    return written, lambda x: torch.from_numpy(session.run(None, {"x": x.numpy()})[0])


def _trace_network(network: nn.Module, shape: tuple[int, ...]) -> Any:
    """Return the network's graph for any number of rows, without paths and code of its files."""
    network = as_batch_norms(network).to(memory_format=torch.contiguous_format)
    rows = torch.zeros(3, *shape)
    dynamic = ({0: torch.export.Dim("rows")},)
    program = torch.export.export(network, (rows,), dynamic_shapes=dynamic)
    for node in program.graph.nodes:  # removes file names and lines of each node
        node.meta.pop("stack_trace", None)
    return program
