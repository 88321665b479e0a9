"""privssl: one classifier from many parties, few labels, and a true sentence on what leaked."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("privssl")
except PackageNotFoundError:  # run from a checkout that was never installed
    __version__ = "0.0.0"

__all__ = ["__version__"]
