"""Mistakes that are made on purpose, and a command that plants each: ``run.py``."""
