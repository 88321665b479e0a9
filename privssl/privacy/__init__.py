"""Differential privacy: plans, DP-SGD, secure noise, the noisy label histogram, the card."""
