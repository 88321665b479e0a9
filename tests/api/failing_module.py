"""Fails when it is imported."""

raise OSError("the driver is not there")
