"""Files that survive a crash, files of tensors, and tensors that spill to disk."""
