"""Parts for privssl, named by entry points (pyproject.toml)."""
