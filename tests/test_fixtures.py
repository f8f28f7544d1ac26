"""The fixtures through the Python API, and the script that makes them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.cases import NUMPY, Array

from poolgrad.core import TensorSpec, adaptive_avg_pool2d_backward, avg_pool2d_backward

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "fixtures"
LAYERS: dict[str, dict[str, Any]] = json.loads((FOLDER / "layers.json").read_text(encoding="utf-8"))
EACH = [(layer, dtype) for layer in LAYERS for dtype in NUMPY]


def load(layer: str, dtype: str, name: str) -> Array:
    array: Array = np.load(FOLDER / layer / dtype / f"{name}.npy", allow_pickle=False)
    return array.view(ml_dtypes.bfloat16) if dtype == "bfloat16" else array


def grad_input(layer: str, given: Array, own: Array | TensorSpec) -> Array:
    arguments = dict(LAYERS[layer])
    if arguments.pop("op") == "adaptive2d":
        return adaptive_avg_pool2d_backward(given, own)
    return avg_pool2d_backward(given, own, **arguments)


def test_the_layers_and_dtypes_are_there() -> None:
    assert list(LAYERS) == ["resnet_stem", "inception_pool", "vgg_pool", "global_pool", "adaptive_7x7"]
    files = {path.relative_to(FOLDER).parts[:2] for path in FOLDER.glob("*/*/*")}
    assert files >= set(EACH)
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) < 2_000_000


@pytest.mark.parametrize(("layer", "dtype"), EACH)
def test_the_api_gives_the_expected_bytes(layer: str, dtype: str) -> None:
    given, own, expected = (load(layer, dtype, name) for name in ("grad_output", "self", "grad_input"))
    assert given.dtype == own.dtype == expected.dtype == NUMPY[dtype]
    result = grad_input(layer, given, own)
    assert result.shape == expected.shape == own.shape
    assert result.tobytes() == expected.tobytes()
    assert len(np.unique(expected.astype(np.float32))) > 10
    from_spec = grad_input(layer, given, TensorSpec(own.shape, dtype))
    assert from_spec.tobytes() == expected.tobytes()


@pytest.mark.parametrize(("layer", "dtype"), EACH)
def test_both_formats_hold_the_same(layer: str, dtype: str) -> None:
    inputs = load_file(FOLDER / layer / dtype / "inputs.safetensors")
    answer = load_file(FOLDER / layer / dtype / "grad_input.safetensors")
    assert sorted(inputs) == ["grad_output", "self"]
    assert list(answer) == ["grad_input"]
    for name, array in {**inputs, **answer}.items():
        twin = load(layer, dtype, name)
        assert array.dtype == twin.dtype
        assert array.shape == twin.shape
        assert array.tobytes() == twin.tobytes()


def test_the_script_makes_the_same_bytes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "fixtures.make_fixtures", str(tmp_path)], cwd=ROOT, check=True)
    made = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file())
    assert len(made) == 5 * len(EACH) + 1
    for path in made:
        assert (tmp_path / path).read_bytes() == (FOLDER / path).read_bytes(), path
