"""Trackers (console, CSV, TensorBoard) and figures."""
