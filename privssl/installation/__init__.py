"""Checks of the machine and of what is installed on it, for ``python -m privssl.doctor``."""
