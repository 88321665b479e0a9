"""(FL)^2: its rounds, its settings, and its thresholds and perturbed weights."""
