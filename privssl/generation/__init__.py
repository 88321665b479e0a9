"""Synthetic rows from a finished run: ``rows`` makes them, ``files`` writes them."""
