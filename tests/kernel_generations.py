"""The generations of processors that our kernels were compiled for and that this one knows."""

from privssl import kernels

HERE = [name for name, known in kernels.GENERATIONS.items() if known() and kernels.versions(name)]
