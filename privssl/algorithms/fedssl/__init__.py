"""FedSSL: its rounds and its losses."""
