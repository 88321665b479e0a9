"""The device of a run, and its parallel execution."""

import torch

from privssl.algorithms import ALGORITHMS
from privssl.engines import batched, process_pool
from privssl.errors import ConfigError
from privssl.experiment.config import Config
from privssl.settings.schema import RunSettings


def device_of_run(config: Config) -> torch.device:
    """Return the device of a run here. Raises as :func:`device_of`."""
    private = config.privacy is not None and config.run.engine == "local"
    noisy = ALGORITHMS[config.algorithm.name].mechanism == "dp-sgd"
    return device_of(config.run.device, private=private and noisy)


def device_of(name: str, *, private: bool = False, key: str = "run.device") -> torch.device:
    """Return the device of that name; ``auto``: the first GPU, else the CPU.

    Args:
        private: for private steps, which run only on the CPU. A GPU chooses kernels by the size of
            a batch, and some add in any order: the bits of a row's gradient depend on other rows,
            so clipping does not bound the effect of one row (docs/performance.md, A GPU).
        key: of the setting, for errors.

    Raises:
        ConfigError: there is no such device, or private steps may not use it.
    """
    if private and name not in ("auto", "cpu"):
        raise ConfigError(
            f"{key} is {name!r}, but private steps need the CPU: a GPU rounds a row's gradient "
            "by the rows beside it, so no guarantee would hold. Give cpu, or auto"
        )
    if private:
        return torch.device("cpu")
    cuda = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    names = ["cpu", *(["cuda", *cuda] if cuda else [])]
    if torch.backends.mps.is_available():
        names.append("mps")
    if name != "auto" and name not in names:
        raise ConfigError(
            f"{key} is {name!r}, but this machine has {', '.join(names)}. Give one of them, or auto"
        )
    return torch.device(("cuda" if cuda else "cpu") if name == "auto" else name)


def check_side_by_side(run: RunSettings, device: torch.device) -> None:
    """Raise ConfigError if workers or batched agents would give other results than one process."""
    reason, threads = process_pool.unsupported_reason(device), torch.get_num_threads()
    if reason is None and threads > 1:  # results would depend on the number of workers
        reason = (
            f"torch has {threads} threads here (OMP_NUM_THREADS), and a worker has one, which "
            "rounds differently (OMP_NUM_THREADS=1 before the command gives all of them one)"
        )
    if run.workers != "auto" and run.workers > 1 and reason is not None:
        raise ConfigError(f"run.workers is {run.workers}, but {reason}. Give 1, or auto")
    reason = batched.unsupported_reason(device)
    if run.batched_agents > 1 and reason is not None:
        raise ConfigError(f"run.batched_agents is {run.batched_agents}, but {reason}. Give 1")
