"""The config of an experiment, and its preparation."""
