"""pfl-research's CIFAR-10 benchmark for ``benchmarks.against_flower_and_pfl``.

``work`` defines the work; every other module does it with one framework.
"""
