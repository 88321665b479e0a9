"""FedTriNet: its rounds and its vote of three networks."""
