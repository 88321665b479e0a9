"""The generations of processors that our kernels were compiled for and that this one knows. None
where ``PRIVSSL_KERNELS=torch`` asks for torch's alone."""

from privssl import kernels

HERE = [
    name
    for name, known in kernels.GENERATIONS.items()
    if kernels.instruction_set() is not None and known() and kernels.versions(name)
]
