"""The generations of processors that our kernels were compiled for and that this one knows. None
where ``PRIVSSL_KERNELS=torch`` asks for torch's alone."""

from privssl.ops import dispatch

HERE = [
    name
    for name, known in dispatch.INSTRUCTION_SETS.items()
    if dispatch.instruction_set() is not None and known() and dispatch.versions(name)
]
