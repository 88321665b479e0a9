"""Checks of torch, native kernels, bfloat16, GPU and data sets."""

import json
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import torch

from privssl.data.downloads import PUBLISHED, download_command
from privssl.errors import PrivacyError
from privssl.installation.finding import Finding, judge
from privssl.installation.machine import DATA_VARIABLE, data_folder
from privssl.installation.software import ROOT
from privssl.ops import dispatch, precision, self_test

GPU_FILES = "results/gpu/*.json"  # measurements of this project, one file per GPU
DRIVERS = ("/dev/nvidia0", "/dev/kfd")  # device files of NVIDIA and AMD


def check_kernels() -> Iterator[Finding]:
    """Check that the native kernels are compiled and correct on this processor."""
    name = dispatch.instruction_set()
    cost = "torch computes instead: training steps of small_cnn take about twice as long"
    if name is not None:
        try:
            self_test.refuse_wrong_kernels()
        except PrivacyError as error:
            yield Finding("kernels", "problem", str(error), "Set PRIVSSL_KERNELS=torch.")
            return
        yield Finding("kernels", "ok", f"{name}; noise and clipping are right on this processor")
    elif os.environ.get("PRIVSSL_KERNELS") == "torch":
        text = f"switched off by PRIVSSL_KERNELS=torch; {cost}"
        yield Finding("kernels", "note", text, "Unset it to use them.")
    elif not any(is_available() for is_available in dispatch.INSTRUCTION_SETS.values()):
        sets = " or ".join(dispatch.INSTRUCTION_SETS)
        yield Finding("kernels", "note", f"none for {platform.machine()} without {sets}; {cost}")
    else:
        yield Finding(
            "kernels", "note", f"absent, or compiled from other sources; {cost}",
            "Install a C++ compiler (g++), then run pip install -e . in the checkout.",
        )  # fmt: skip


def check_bfloat16() -> Iterator[Finding]:
    """Check whether the processor multiplies in bfloat16."""
    has_instructions = precision.has_instructions()
    text = "this processor has instructions for it"
    if not has_instructions:
        text = "no instructions for it are known on this processor, so it is slow here"
    advice = "Leave run.precision at float32 or auto."
    yield judge("bfloat16", has_instructions, text, advice, otherwise="note")


def check_gpu(root: Path = ROOT) -> Iterator[Finding]:
    """Check which GPUs torch sees, and whether this project has measurements of one."""
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        names.append("Apple's (mps)")
    driver = next((file for file in DRIVERS if Path(file).exists()), None)
    built = torch.version.cuda or getattr(torch.version, "hip", None)
    if not names and driver is not None:
        reason = f"torch is built for {built}" if built else "torch is built for CPUs alone"
        yield Finding(
            "GPU", "problem", f"{driver} is there, but torch sees no GPU ({reason})",
            "Install the torch of your driver (pytorch.org, Get started), and look at "
            "CUDA_VISIBLE_DEVICES.",
        )  # fmt: skip
        return
    measured = sorted(measured_gpus(root))
    text = f"measured on {', '.join(measured)}" if measured else "no GPU was ever measured"
    if not names:
        yield Finding("GPU", "ok", "none seen by torch: runs take the processor")
    elif set(names) <= set(measured):
        yield Finding("GPU", "ok", f"{', '.join(names)}; {text}")
    else:
        yield Finding(
            "GPU", "note", f"{', '.join(names)}; {text}, so speed and last bits are unknown here",
            "run.device=cpu is what the figures of docs/performance.md were measured on.",
        )  # fmt: skip


def measured_gpus(root: Path) -> set[str]:
    """Return the names of GPUs with a full report of ``make gpu-report`` (``GPU_FILES``)."""
    names = set()
    for file in root.glob(GPU_FILES):
        try:
            report = json.loads(file.read_text("utf-8"))
            name, is_small = report["gpu"], report["small"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if isinstance(name, str) and not is_small:
            names.add(name)
    return names


def check_data_sets() -> Iterator[Finding]:
    """Check which built-in data sets are present. Downloads nothing."""
    bundled = Path(dispatch.__file__).parents[1] / "data" / "digits.npz"
    present = bundled.is_file()
    text = "bundled" if present else f"{bundled} is absent"
    yield judge("data digits", present, text, "Install privssl again.", otherwise="problem")
    root = data_folder()
    if root is None:
        return  # check_disk reports it
    for name, published in PUBLISHED.items():
        absent = [file for file in published.files if not (root / file).is_file()]
        if not absent:
            yield Finding(f"data {name}", "ok", f"in {root}")
            continue
        count = f"{len(absent)} of {len(published.files)} files are absent"
        text = count if len(absent) < len(published.files) else "absent"
        yield Finding(
            f"data {name}", "note", f"{text} in {root}",
            f"The first run downloads it. Before: {download_command(name, root)}. Or set "
            f"{DATA_VARIABLE} to the folder that has it.",
        )  # fmt: skip
