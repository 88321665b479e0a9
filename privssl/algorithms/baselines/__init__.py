"""Baselines: supervised, pseudo-labelling, FixMatch and UDA, FedSSL's own."""
