"""One experiment: its config file, and what is prepared from it."""
