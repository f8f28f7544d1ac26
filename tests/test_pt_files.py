"""What torch.save writes, on a CPU and on an NPU, and what it does not; dumps of PyTorch against its autograd."""

from __future__ import annotations

import enum
import importlib
import importlib.util
import os
import sys
import types
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.cases import NUMPY
from tests.command_line import poolgrad
from tests.dumps import K2, Dump, add_avg, gradients, save_pt
from tests.test_msprobe import only, run

from poolgrad.cli.tensor_files import open_tensor
from poolgrad.core.tiles import Box

takes_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="takes torch")


def test_without_torch_a_line_says_which_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    (tmp_path / "a.pt").write_bytes(b"PK")
    result = poolgrad("avg2d", tmp_path / "a.pt", tmp_path / "a.pt", "-k", "2", "-o", tmp_path / "out.npy")
    assert result.code == 3
    assert result.error.endswith("is a PyTorch file; reading it takes the extra torch: pip install 'poolgrad[torch]'")


def test_a_pytorch_dump_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dump = add_avg(Dump(tmp_path / "rank0"), "Functional.avg_pool2d.0", K2, 2, 2)
    for path in dump.tensors.iterdir():
        path.rename(path.with_suffix(".pt"))
    text = (dump.write() / "dump.json").read_text()
    (dump.folder / "dump.json").write_text(text.replace(".npy", ".pt").replace("mindspore", "pytorch"))
    monkeypatch.setitem(sys.modules, "torch", None)
    record = only(dump.folder)
    assert record["status"] == "unchecked"
    assert record["reason"].endswith("reading it takes the extra torch: pip install 'poolgrad[torch]'")


def test_pt_files_are_only_read(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((1, 1, 4, 4), np.float32))
    result = poolgrad("avg2d", tmp_path / "a.npy", tmp_path / "a.npy", "-k", "1", "-o", tmp_path / "out.pt")
    assert result.code == 3
    assert ".pt files are only read" in result.error


def autograd(name: str, dump: Dump, dtype: str, shape: tuple[int, ...], *arguments: Any, **keywords: Any) -> None:
    """Record what torch's own forward and backward do."""
    torch = importlib.import_module("torch")
    functional = importlib.import_module("torch.nn.functional")
    own = torch.randn(shape, generator=torch.Generator().manual_seed(3)).requires_grad_()
    output = getattr(functional, name.split(".")[1])(own, *arguments, **keywords)
    grad_output = torch.randn(output.shape, generator=torch.Generator().manual_seed(4))
    # In float64, and rounded once: torch's own 16-bit kernels add in 16 bits.
    given = grad_output.to(getattr(torch, dtype))
    wide = own.detach().double().requires_grad_()
    getattr(functional, name.split(".")[1])(wide, *arguments, **keywords).backward(given.double())
    arrays = [tensor.detach().double().numpy() for tensor in (own, given, wide.grad)]
    dump.call(name, *(array.astype(NUMPY[dtype]) for array in arrays), *arguments, **keywords)


@takes_torch
@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_pytorch_dump(tmp_path: Path, dtype: str) -> None:
    dump = Dump(tmp_path / "rank0", "pytorch")
    autograd("Functional.avg_pool2d.0", dump, dtype, (2, 3, 11, 9), (3, 2), padding=(1, 0), ceil_mode=True)
    autograd("Functional.avg_pool2d.1", dump, dtype, (2, 3, 8, 8), 3, 1, 1, count_include_pad=False)
    autograd("Functional.avg_pool2d.2", dump, dtype, (3, 8, 8), 2, None, 0, False, True, 7)
    autograd("Functional.adaptive_avg_pool2d.0", dump, dtype, (2, 3, 11, 9), (None, 4))
    folder = dump.write()
    records = run(folder)
    assert [(record["status"], record["comparison"]["precision_row"]) for record in records] == [("ok", dtype)] * 4
    if dtype != "float32":
        assert all(record["comparison"]["ulp"]["max"] <= 1 for record in records)


@takes_torch
@pytest.mark.torch
def test_a_pytorch_dump_that_is_wrong(tmp_path: Path) -> None:
    dump = Dump(tmp_path / "rank0", "pytorch")
    own, grad_output, grad_input = gradients(K2, (1, 2, 8, 8), dtype="bfloat16")
    dump.call(
        "Functional.avg_pool2d.0", own, grad_output, (grad_input.astype(float) * 4).astype(NUMPY["bfloat16"]), 2
    )
    record = only(dump.write(), "--diagnose")
    assert record["status"] == "failed"
    assert "a constant factor of 2^2" in record["diagnosis"]["sentence"]


def pt_file(tmp_path: Path, value: Any, **options: Any) -> Path:
    torch = importlib.import_module("torch")
    path = tmp_path / "tensor.pt"
    torch.save(value, path, **options)
    return path


def pt_refusal(path: Path) -> str:
    """The one line for a .pt file that is refused."""
    result = poolgrad("avg2d", path, path, "-k", "1", "-o", path.parent / "out.npy")
    assert result.code == 3, result.err
    return result.error


@takes_torch
@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_elements_of_a_pt_file(tmp_path: Path, dtype: str) -> None:
    array = np.random.default_rng(5).standard_normal((2, 3, 5, 7)).astype(NUMPY[dtype])
    save_pt(tmp_path / "a.pt", array)
    result = poolgrad("avg2d", tmp_path / "a.pt", tmp_path / "a.pt", "-k", "1", "-o", tmp_path / "out.npy", "-q")
    assert (result.code, result.err) == (0, "")
    written = np.load(tmp_path / "out.npy")
    assert np.array_equal(written.view(NUMPY[dtype]) if dtype == "bfloat16" else written, array)


def npu_file(tmp_path: Path, values: Any) -> Path:
    """As torch_npu saves: a CPU's storage, under a function and a format of its own, which are not installed here."""
    torch = importlib.import_module("torch")
    with fake_torch_npu() as (rebuild, form):

        class NpuTensor(torch.Tensor):  # type: ignore[misc, name-defined]
            def __reduce_ex__(self, protocol: Any) -> Any:
                plain = self.as_subclass(torch.Tensor)
                storage: Any = plain._typed_storage()
                return rebuild, (storage, 0, tuple(plain.size()), plain.stride(), False, OrderedDict(), form(2))

        path = pt_file(tmp_path, values.as_subclass(NpuTensor))
    assert b"torch_npu" in path.read_bytes()
    assert "torch_npu" not in sys.modules
    return path


@takes_torch
@pytest.mark.torch
def test_a_pt_file_of_an_npu(tmp_path: Path) -> None:
    values = importlib.import_module("torch").arange(24.0).reshape(1, 2, 3, 4)
    with open_tensor(str(npu_file(tmp_path, values)), "grad_output", False) as tensor:
        assert (tensor.spec.shape, tensor.spec.dtype) == ((1, 2, 3, 4), "float32")
        box = Box(slice(0, 2), slice(0, 3), slice(0, 4))
        assert np.array_equal(tensor.source().read(box, None), values.numpy()[0])


@takes_torch
@pytest.mark.torch
def test_a_pt_file_of_an_npu_takes_a_later_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = importlib.import_module("torch")
    path = npu_file(tmp_path, torch.zeros(1, 1, 3, 4))
    monkeypatch.delattr(torch.serialization, "safe_globals")
    assert pt_refusal(path).endswith("was saved on an NPU; reading it takes torch 2.5 or later")


@contextmanager
def fake_torch_npu() -> Iterator[tuple[Any, Any]]:
    """Modules that have what torch_npu's pickles name, while this lasts."""
    names = ["torch_npu", "torch_npu.utils", "torch_npu.utils.storage", "torch_npu.npu", "torch_npu.npu._format"]
    fakes = {name: types.ModuleType(name) for name in names}

    def rebuild(*_arguments: Any) -> Any:
        raise AssertionError("not to be called")

    rebuild.__module__, rebuild.__qualname__, rebuild.__name__ = names[2], *["_rebuild_npu_tensor"] * 2

    class Format(enum.IntEnum):
        ND = 2

    Format.__module__, Format.__qualname__ = names[4], "Format"
    setattr(fakes[names[2]], "_rebuild_npu_tensor", rebuild)  # noqa: B010
    setattr(fakes[names[4]], "Format", Format)  # noqa: B010
    sys.modules.update(fakes)
    try:
        yield rebuild, Format
    finally:
        for name in names:
            del sys.modules[name]


class Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


@takes_torch
@pytest.mark.torch
def test_no_code_in_a_pt_file_is_run(tmp_path: Path) -> None:
    torch = importlib.import_module("torch")
    evil = Evil(tmp_path / "ran")
    assert "holds 0 tensors' elements" in pt_refusal(pt_file(tmp_path, evil))
    assert "holds more than a tensor, which poolgrad never loads" in pt_refusal(
        pt_file(tmp_path, [torch.zeros(1), evil])
    )
    assert not (tmp_path / "ran").exists()


@takes_torch
@pytest.mark.torch
def test_pt_files_that_hold_something_else(tmp_path: Path) -> None:
    torch = importlib.import_module("torch")
    assert "holds a dict of 1, expected one tensor" in pt_refusal(pt_file(tmp_path, {"a": torch.zeros(3)}))
    assert "holds 0 tensors' elements" in pt_refusal(pt_file(tmp_path, [1, 2]))
    assert "holds 2 tensors' elements" in pt_refusal(pt_file(tmp_path, [torch.zeros(1), torch.zeros(2)]))
    assert "is not contiguous" in pt_refusal(pt_file(tmp_path, torch.zeros(1, 1, 4, 6).transpose(2, 3)))
    assert "is not contiguous" in pt_refusal(pt_file(tmp_path, torch.zeros(1, 1, 4, 6)[:, :, 1:]))
    old = pt_file(tmp_path, torch.zeros(1, 1, 4, 6), _use_new_zipfile_serialization=False)
    assert "is not a file of torch.save (of torch 1.6 or later)" in pt_refusal(old)


def rewritten(path: Path, change: Callable[[str, bytes], bytes], compression: int = zipfile.ZIP_STORED) -> Path:
    """The archive with other members."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, change(name, content))
    return path


@takes_torch
@pytest.mark.torch
def test_archives_that_torch_did_not_write(tmp_path: Path) -> None:
    torch = importlib.import_module("torch")
    tensor = torch.arange(48.0).reshape(1, 2, 4, 6)
    compressed = rewritten(pt_file(tmp_path, tensor), lambda _, content: content, zipfile.ZIP_DEFLATED)
    assert "is compressed, which torch.save never does" in pt_refusal(compressed)
    longer = rewritten(pt_file(tmp_path, tensor), lambda name, content: content + b"1234" * ("data/" in name))
    assert "its description does not go with the 196 bytes of its elements" in pt_refusal(longer)
    shorter = rewritten(pt_file(tmp_path, tensor), lambda name, content: content[: 50 if "data/" in name else None])
    assert "its description does not go with the 50 bytes of its elements" in pt_refusal(shorter)
    padded = rewritten(pt_file(tmp_path, tensor), lambda name, content: content + bytes((1 << 20) * ("pkl" in name)))
    assert "its data.pkl is too long for one tensor" in pt_refusal(padded)
    with zipfile.ZipFile(tmp_path / "tensor.pt", "w") as archive:
        archive.writestr("a/b", b"")
    assert "is not a file of torch.save: it has no data.pkl" in pt_refusal(tmp_path / "tensor.pt")


@takes_torch
@pytest.mark.torch
def test_big_endian_elements(tmp_path: Path) -> None:
    torch = importlib.import_module("torch")
    values = torch.arange(48.0).reshape(1, 2, 4, 6)

    def swap(name: str, content: bytes) -> bytes:
        if name.endswith("/byteorder"):
            return b"big"
        return np.frombuffer(content, "<f4").astype(">f4").tobytes() if "/data/" in name else content

    path = rewritten(pt_file(tmp_path, values), swap)
    poolgrad("avg2d", path, path, "-k", "1", "-o", tmp_path / "out.npy", "-q")
    assert np.array_equal(np.load(tmp_path / "out.npy"), values.numpy())


@takes_torch
@pytest.mark.torch
def test_damaged_pt_files(tmp_path: Path) -> None:
    torch = importlib.import_module("torch")
    whole = pt_file(tmp_path, torch.arange(48.0).reshape(1, 2, 4, 6)).read_bytes()
    path, wrong = tmp_path / "tensor.pt", 0
    for size in range(0, len(whole), 37):
        path.write_bytes(whole[:size])
        assert pt_refusal(path).startswith(f"poolgrad avg2d: {path}")
    rng = np.random.default_rng(6)
    for _ in range(150):
        data = bytearray(whole)
        for place in rng.integers(0, len(data), 3):
            data[place] = rng.integers(256)
        path.write_bytes(data)
        result = poolgrad("avg2d", path, path, "-k", "1", "-o", tmp_path / "out.npy", "-q")
        assert result.code in (0, 2, 3), result.err
        assert result.err.count("\n") <= 1
        wrong += result.code != 0
    assert wrong > 10
