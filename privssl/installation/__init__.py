"""Checks of the machine and of installed packages, for ``python -m privssl.doctor``."""
