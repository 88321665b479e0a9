"""The process of a command: signals, console, randomness, version of the code."""
