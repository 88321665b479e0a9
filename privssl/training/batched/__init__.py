"""Training of several agents side by side in one batched pass."""
