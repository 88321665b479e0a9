"""Atomic files, files of tensors, and tensors that spill to disk."""
