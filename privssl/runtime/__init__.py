"""The process a command runs in: signals, console, randomness, version of the code."""
