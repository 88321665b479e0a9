"""Benchmarks that docs and results cite; each is a command. They are not tests."""
