"""Local training of one agent's networks, and its losses."""
