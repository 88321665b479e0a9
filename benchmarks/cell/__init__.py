"""pfl-research's CIFAR-10 cell, as ``benchmarks.against_flower_and_pfl`` has it done: ``work`` says
what is to be done, every other module how one competitor does it."""
