"""A run: its rounds, its folder, its checkpoints and accounts, and how it resumes."""
