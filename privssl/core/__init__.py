"""Core types of algorithms and engines: agents, messages, steps, aggregation."""
