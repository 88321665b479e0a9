"""Settings from YAML: their types, and clear errors with line numbers."""
