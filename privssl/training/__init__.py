"""Local training of one agent's networks, and the losses it takes."""
