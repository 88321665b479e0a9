"""Engines deliver messages to agents and bring replies back; they know no algorithm."""
