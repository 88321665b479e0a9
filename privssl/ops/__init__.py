"""Layers and native kernels (sources in csrc/); ``dispatch`` picks the instruction set."""
