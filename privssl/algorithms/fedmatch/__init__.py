"""FedMatch: its rounds, disjoint training, helpers and sparse updates."""
