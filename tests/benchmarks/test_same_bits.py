"""How ``benchmarks.same_bits`` compares two checkouts, and which results it adopts."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import same_bits


def test_tensors_are_equal_only_if_name_type_shape_and_every_bit_are() -> None:
    weights = {"w": torch.tensor([0.0, float("nan")]), "scalar": torch.tensor(1)}
    assert same_bits._find_differing(weights, {k: v.clone() for k, v in weights.items()}) == []
    for name, other in {
        "bit": torch.tensor([-0.0, float("nan")]),
        "type": weights["w"].double(),
        "shape": weights["w"][None],
    }.items():
        assert same_bits._find_differing(weights, {**weights, "w": other}) == ["w"], name
    assert same_bits._find_differing(weights, {"w": weights["w"]}) == ["scalar"]
    assert same_bits._find_differing({"w": weights["w"]}, weights) == ["scalar"]


def test_only_results_of_the_other_checkouts_code_are_adopted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(same_bits, "HERE", tmp_path)
    folder = tmp_path / "results" / "table" / "cell"
    folder.mkdir(parents=True)
    for seed, sources in enumerate(("former", "older")):
        (folder / f"{seed}.json").write_text(json.dumps({"commit": "c", "sources": sources}))
    assert same_bits._adopt({"former": "new", "same": "same"}) == 1
    found = [json.loads((folder / f"{seed}.json").read_text()) for seed in (0, 1)]
    assert found == [{"commit": "c", "sources": "new"}, {"commit": "c", "sources": "older"}]
