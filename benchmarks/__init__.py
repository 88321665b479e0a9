"""Measurements of cost that docs and claims name; each is a command. They are no tests."""
