"""privssl: federated semi-supervised learning with privacy accounting.

    run = privssl.train("configs/fedssl.yaml", {"run.seed": 1})     # docs/python.md

Names are loaded when they are used, so that ``import privssl`` does not wait for torch.
"""

from importlib import metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from privssl.api.datasets import Dataset
    from privssl.api.experiment import Experiment, load, train
    from privssl.api.run import Run, open_run
    from privssl.errors import UserError

try:
    __version__ = metadata.version("privssl")
except metadata.PackageNotFoundError:  # a checkout that was never installed
    __version__ = "0.0.0"

__all__ = ["Dataset", "Experiment", "Run", "UserError", "__version__", "load", "open_run", "train"]


def __getattr__(name: str) -> Any:
    match name:
        case "train":  # a callable module: see privssl/train.py
            import privssl.train

            return privssl.train
        case "Experiment" | "load":
            from privssl.api import experiment as module
        case "Dataset":
            from privssl.api import datasets as module  # type: ignore[no-redef]
        case "Run" | "open_run":
            from privssl.api import run as module  # type: ignore[no-redef]
        case "UserError":
            from privssl import errors as module  # type: ignore[no-redef]
        case _:
            raise AttributeError(f"module 'privssl' has no attribute {name!r}")
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
