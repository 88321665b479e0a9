"""Runs several configs on the same splits and seeds (``python -m privssl.compare``)."""
