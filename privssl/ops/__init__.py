"""Layers and native kernels (sources in csrc/); ``dispatch`` chooses the instruction set."""
