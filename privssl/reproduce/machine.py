"""The machine and code of a measurement: processor, GPU and commit."""

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from privssl.experiment.config import Config
from privssl.experiment.devices import device_of_run
from privssl.experiment.plugin_names import imports_of
from privssl.ops.precision import is_emulated

#: Instruction sets that affect results or times.
INSTRUCTIONS = (
    *("sse4_2", "avx", "avx2", "fma", "f16c", "avx512f", "avx512dq", "avx512bw", "avx512vl"),
    *("avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "asimd", "bf16", "sve"),
)
CODE = ("privssl", "generators", "accounting", "configs")  # folders that determine results


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, Any]:
    """Return name, family and model numbers, instruction sets, and cores of this machine."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    lines = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    fields = {key.strip(): value.strip() for key, _, value in lines}
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    return {
        "name": fields.get("model name") or platform.processor() or platform.machine(),
        "vendor": fields.get("vendor_id") or fields.get("CPU implementer"),
        "family": fields.get("cpu family") or fields.get("CPU architecture"),
        "model": fields.get("model") or fields.get("CPU part"),
        "instructions": [name for name in INSTRUCTIONS if name in flags],
        "cores": os.cpu_count(),
    }


def gpu_name(config: Config) -> str | None:
    """Return the GPU of a run here; None for other devices, as for private steps."""
    with imports_of(config):  # the plug-ins of the table
        device = device_of_run(config)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def is_bfloat16_emulated(config: Config) -> bool:
    """Return whether a run would compute in bfloat16 on a processor without its instructions."""
    return is_emulated(config.run.precision, config.run.device)


def commit_of(root: Path) -> dict[str, Any]:
    """Return the commit of a clone, and whether code or configs differ from it; else nulls."""
    head = _run_git(root, "rev-parse", "HEAD")
    changes = None if head is None else _run_git(root, "status", "--porcelain", "--", *CODE)
    return {"commit": head, "dirty": None if changes is None else bool(changes)}


def _run_git(root: Path, *arguments: str) -> str | None:
    try:
        result = subprocess.run(
            ["git", *arguments], cwd=root, check=True, capture_output=True, text=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return result.stdout.strip()
