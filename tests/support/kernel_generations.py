"""The instruction sets that our kernels were compiled for and that this processor has.

Empty if ``PRIVSSL_KERNELS=torch`` selects torch's kernels.
"""

from privssl.ops import dispatch

HERE = [
    name
    for name, known in dispatch.INSTRUCTION_SETS.items()
    if dispatch.instruction_set() is not None and known() and dispatch.versions(name)
]
