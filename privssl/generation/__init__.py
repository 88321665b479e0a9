"""Synthetic rows of a finished run: ``rows`` generates them, ``files`` writes them."""
