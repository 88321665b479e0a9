"""(FL)^2: its rounds, and its thresholds and perturbed weights."""
