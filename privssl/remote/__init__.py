"""Transport to sites across a network: protocol, keys, TLS and Flower."""
