"""Whether this checkout trains the same bits as another one, and so may keep its results.

    python -m benchmarks.same_bits OTHER [CONFIG...] [--adopt]

Trains four rounds of each config in both checkouts, and compares every tensor of the checkpoint and
of the classifier. By default every config of configs/ without privacy, because private noise has no
seed; a label census is trained without its noise. OTHER is a clone or a worktree, with its kernels
compiled.

With ``--adopt``, if all are equal, stored results of the compared methods (results/) keep their
mark: the hash of OTHER's code in them becomes that of this checkout. Their commit stays. Compare
before, with tests, what no config here asks.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import yaml
from torch import Tensor

from benchmarks.processes import parser_of
from privssl.storage.tensor_files import open_lazily

HERE = Path(__file__).parents[1]
HASHES = (
    "import json; from pathlib import Path; from privssl.algorithms import ALGORITHMS;"
    "from privssl.reproduce.method_sources import method_hash;"
    "print(json.dumps({name: method_hash(name, Path()) for name in ALGORITHMS}))"
)
# So that four rounds have both phases of a method.
CENSUS = ["algorithm.vote_rounds=2", "algorithm.self_training_rounds=2"]
WARM_UPS = {"fedtrinet": 2, "fedsem": 1, "lg_fedavg": 2}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 1 if a tensor differs or a run fails."""
    parser = parser_of("same_bits", __doc__)
    parser.add_argument("other", type=Path)
    parser.add_argument("configs", nargs="*", type=Path)
    parser.add_argument("--adopt", action="store_true")
    options = parser.parse_args(arguments)
    compared, equal = set[str](), True
    for config in options.configs or sorted(HERE.glob("configs/*.yaml")):
        settings = yaml.safe_load(config.read_text(encoding="utf-8"))
        method = settings["algorithm"]["name"]
        if method == "label_census":  # its noise alone has no seed
            settings.pop("privacy", None)
        if "privacy" in settings or settings["data"]["name"] != "digits":
            continue
        with tempfile.TemporaryDirectory() as folder:
            plain = Path(folder, config.name)
            plain.write_text(yaml.safe_dump(settings), encoding="utf-8")
            there, here = (
                _train(checkout, plain, method, Path(folder, name))
                for name, checkout in (("there", options.other), ("here", HERE))
            )
        differing = _find_differing(there, here)
        print(f"{config.name}: {len(here)} tensors, {len(differing)} differ", *differing[:3])
        equal = equal and not differing
        compared.add(method)
    if equal and options.adopt:
        there_hashes, here_hashes = (_hash_methods(path) for path in (options.other, HERE))
        adopted = _adopt({there_hashes[name]: here_hashes[name] for name in compared})
        print(f"{adopted} results have the hash of this checkout")
    return 0 if equal else 1


def _train(checkout: Path, config: Path, method: str, folder: Path) -> dict[str, Tensor]:
    """Train in a checkout; return all tensors of the run folder, by file and name."""
    short = CENSUS if method == "label_census" else ["algorithm.rounds=4"]
    changes = [*short, "run.workers=1", f"run.output={folder}"]
    if method in WARM_UPS:
        changes.append(f"algorithm.warm_up={WARM_UPS[method]}")
    _run(checkout, "-m", "privssl.train", str(config.resolve()), *changes, "--quiet")
    return {
        f"{file.relative_to(folder)}: {name}": tensor
        for file in sorted(folder.rglob("*.safetensors"))
        for name, tensor in open_lazily(file).items()
    }


def _run(checkout: Path, *arguments: str) -> str:
    """Run Python in a checkout; return its standard output."""
    checkout = checkout.resolve()
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=checkout, env=environment, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def _find_differing(there: Mapping[str, Tensor], here: Mapping[str, Tensor]) -> list[str]:
    """Return the names of tensors that differ in a bit, or that one of the two lacks."""
    return [
        name
        for name in sorted(there.keys() | here.keys())
        if name not in there
        or name not in here
        or there[name].dtype != here[name].dtype
        or there[name].shape != here[name].shape
        or not torch.equal(_to_bytes(there[name]), _to_bytes(here[name]))
    ]


def _to_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _hash_methods(checkout: Path) -> dict[str, str]:
    hashes: dict[str, str] = json.loads(_run(checkout, "-c", HASHES))
    return hashes


def _adopt(new_hashes: Mapping[str, str]) -> int:
    """Replace hashes in the stored results; return how many had one."""
    adopted = 0
    for path in HERE.glob("results/*/*/*.json"):
        text = path.read_text(encoding="utf-8")
        old = json.loads(text).get("sources")
        if old in new_hashes and new_hashes[old] != old:
            text = text.replace(f'"sources": "{old}"', f'"sources": "{new_hashes[old]}"')
            path.write_text(text, encoding="utf-8")
            adopted += 1
    return adopted


if __name__ == "__main__":
    sys.exit(main())
