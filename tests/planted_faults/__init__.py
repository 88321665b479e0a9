"""Mistakes that are made on purpose, and a command that plants each: ``runs/round_loop.py``."""
