"""SemiFL: settings, losses and the algorithm."""
