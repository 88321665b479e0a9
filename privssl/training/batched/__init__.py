"""Batched training of several agents."""
