"""Checks the ledger and the privacy claim of a finished run (``python -m privssl.audit``)."""
