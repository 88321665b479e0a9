"""Measurement of published tables cell by cell, and the store of results."""
