"""Engines deliver messages to agents and return their replies, independently of the algorithm."""
