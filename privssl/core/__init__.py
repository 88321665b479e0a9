"""What every algorithm and engine stands on: agents, messages, steps, aggregation."""
