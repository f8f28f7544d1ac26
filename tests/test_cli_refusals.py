"""Every call and file that must be refused: exit code, one clear line, JSON code, and no output file."""

from __future__ import annotations

import json
import os
import struct
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tests.command_line import ENTRY, Result, poolgrad, poolgrad_process, save, save_safetensors, zeros

BF16 = np.dtype(ml_dtypes.bfloat16)
Shape = tuple[int, ...]


def refused(tmp_path: Path, code: int, name: str, number: int | None, *arguments: object) -> str:
    """Run with and without --json, check all but the message, and return that."""
    before = sorted(os.listdir(tmp_path))
    plain = poolgrad(*arguments)
    as_json = poolgrad(*arguments, "--json")
    assert (plain.code, as_json.code) == (code, code), plain.err
    assert plain.out == ""
    record = as_json.record
    message = record.pop("message")
    assert record == {"schema": 1, "status": "error", "code": number, "name": name}
    suffix = "" if number is None else f" ({name} {number})"
    assert plain.error == as_json.error == f"poolgrad {arguments[0]}: {message}{suffix}"
    assert sorted(os.listdir(tmp_path)) == before
    assert isinstance(message, str)
    return message


@dataclass(frozen=True)
class Call:
    """A call that the operator's contract rejects."""

    label: str
    self_shape: Shape
    grad_shape: Shape
    flags: str
    message: str
    op: str = "avg2d"
    self_dtype: Any = np.float32
    grad_dtype: Any = None

    def run(self, tmp_path: Path) -> str:
        grad_dtype = self.self_dtype if self.grad_dtype is None else self.grad_dtype
        grad_output = zeros(tmp_path / "grad_output.npy", self.grad_shape, grad_dtype)
        own = zeros(tmp_path / "self.npy", self.self_shape, self.self_dtype)
        arguments = [self.op, grad_output, own, "-o", tmp_path / "out.npy", *self.flags.split()]
        return refused(tmp_path, 2, "ACLNN_ERR_PARAM_INVALID", 161002, *arguments)


SQUARE: tuple[Shape, Shape] = (1, 1, 4, 4), (1, 1, 2, 2)
TRAINING = "-k 2 --product atlas-training"

CALLS = [
    Call(
        "ceil-third-column",
        (1, 1, 8, 8),
        (1, 1, 3, 3),
        "-k 3 -s 3,4 --ceil-mode",
        "gradOutput is 3x3, kernel 3 stride 3,4 padding 0 ceil_mode over 8x8 gives 3x2",
    ),
    Call(
        "ceil-padding",
        (1, 16, 4, 4),
        (1, 16, 3, 3),
        "-k 1,2 -s 2 -p 0,1 --ceil-mode",
        "gradOutput is 3x3, kernel 1,2 stride 2 padding 0,1 ceil_mode over 4x4 gives 2x3",
    ),
    Call(
        "empty-output",
        (1, 1, 7, 7),
        (1, 1, 1, 1),
        "-k 1280",
        "kernel 1280 stride 1280 padding 0 over 7x7 leaves no output; 1x1 is what --ceil-mode gives",
    ),
    Call(
        "padding-swapped",
        (1, 1, 8, 6),
        (1, 1, 7, 6),
        "-k 4,5 -s 1 -p 2,1",
        "gradOutput is 7x6, kernel 4,5 stride 1 padding 2,1 over 8x6 gives 9x4; 7x6 is what padding 1,2 (H,W) gives",
    ),
    Call(
        "needs-ceil",
        (1, 1, 112, 112),
        (1, 1, 57, 57),
        "-k 3 -s 2 -p 1",
        "gradOutput is 57x57, kernel 3 stride 2 padding 1 over 112x112 gives 56x56; 57x57 is what --ceil-mode gives",
    ),
    Call(
        "needs-floor",
        (1, 1, 112, 112),
        (1, 1, 56, 56),
        "-k 3 -s 2 -p 1 --ceil-mode",
        "gives 57x57; 56x56 is what it gives without --ceil-mode",
    ),
    Call("half-of-1", (1, 4, 4, 4), (1, 4, 4, 2), "-k 1,2 -p 1,0", "padding 1 (H) is over half of kernel 1"),
    Call("k3-p2", *SQUARE, "-k 3 -p 2", "padding 2 (H) is over half of kernel 3; expected at most 1"),
    Call("k3-p3", *SQUARE, "-k 3 -p 3", "padding 3 (H) is over half of kernel 3; expected at most 1"),
    Call("k13-p13", *SQUARE, "-k 1,3 -p 1,3", "padding 1 (H) is over half of kernel 1; expected at most 0"),
    Call("s0", *SQUARE, "-k 2 -s 0", "stride is 0; expected above 0"),
    Call("s-one-0", *SQUARE, "-k 2 -s 2,0", "stride is 2,0; expected above 0"),
    Call("k0", *SQUARE, "-k 0", "kernelSize is 0; expected above 0"),
    Call("k-negative", *SQUARE, "-k -3", "kernelSize is -3; expected above 0"),
    Call("p-negative", *SQUARE, "-k 2 -p -1", "padding is -1; expected at least 0"),
    Call("k-three", *SQUARE, "-k 2,2,2", "kernelSize is 3 integers, (2, 2, 2)"),
    Call("s-three", *SQUARE, "-k 2 -s 2,2,2", "stride is 3 integers, (2, 2, 2)"),
    Call("p-three", *SQUARE, "-k 2 -p 0,0,0", "padding is 3 integers, (0, 0, 0)"),
    Call("k-past-int64", *SQUARE, f"-k {2**63}", f"kernelSize is {2**63}; expected above 0, and below 2^63"),
    Call("k-huge", *SQUARE, "-k 1250999896764 -s 1250999896764", "over 4x4 leaves no output"),
    Call("n-broadcast", (2, 3, 4, 4), (1, 3, 2, 2), "-k 2", "gradOutput has N = 1 and self N = 2"),
    Call("c-broadcast", (2, 3, 4, 4), (2, 1, 2, 2), "-k 2", "gradOutput has C = 1 and self C = 3"),
    Call("ranks", (2, 3, 4, 4), (3, 2, 2), "-k 2", "gradOutput has rank 3 and self rank 4"),
    Call("rank-2", (4, 4), (2, 2), "-k 2", "gradOutput has rank 2, shape (2, 2); expected (N, C, H, W) or"),
    Call("rank-5", (1, 1, 1, 4, 4), (1, 1, 1, 2, 2), "-k 2", "gradOutput has rank 5"),
    Call("adaptive-c", (1, 1, 1, 1), (1, 2, 1, 1), "", "gradOutput has C = 2 and self C = 1", "adaptive2d"),
    Call("adaptive-rank", (1, 48), (1, 3, 8, 3), "", "self has rank 2, shape (1, 48)", "adaptive2d"),
    Call("dtypes", *SQUARE, "-k 2", "gradOutput is float16 and self float32", grad_dtype=np.float16),
    Call(
        "adaptive-dtypes",
        *SQUARE,
        "",
        "gradOutput is float16 and self float32",
        "adaptive2d",
        grad_dtype=np.float16,
    ),
    Call(
        "float64",
        *SQUARE,
        "-k 2",
        "the tensors are float64; expected float32, float16 or bfloat16",
        self_dtype="f8",
    ),
    Call("int32", *SQUARE, "-k 2", "the tensors are int32; expected float32, float16 or", self_dtype="i4"),
    Call("uint16", *SQUARE, "-k 2", "the tensors are uint16; expected float32, float16 or", self_dtype="u2"),
    Call("adaptive-float64", *SQUARE, "", "the tensors are float64; expected", "adaptive2d", self_dtype="f8"),
    Call("adaptive-int32", *SQUARE, "", "the tensors are int32; expected", "adaptive2d", self_dtype="i4"),
    Call("empty-n", (0, 1, 4, 4), (0, 1, 2, 2), "-k 2", "gradOutput is empty, shape (0, 1, 2, 2)"),
    Call("empty-c", (1, 0, 4, 4), (1, 0, 2, 2), "-k 2", "gradOutput is empty, shape (1, 0, 2, 2)"),
    Call("empty-h", (1, 1, 0, 4), (1, 1, 0, 2), "-k 2", "gradOutput is empty, shape (1, 1, 0, 2)"),
    Call("empty-w", (1, 1, 4, 0), (1, 1, 2, 2), "-k 2", "self is empty, shape (1, 1, 4, 0)"),
    Call("adaptive-empty", (1, 1, 4, 4), (1, 1, 0, 2), "", "gradOutput is empty", "adaptive2d"),
    Call("adaptive-empty-n", (0, 1, 4, 4), (0, 1, 2, 2), "", "gradOutput is empty", "adaptive2d"),
    Call("training-bfloat16", *SQUARE, TRAINING, "the tensors are bfloat16; expected", self_dtype=BF16),
    Call("training-keep-dtype", *SQUARE, TRAINING, "cubeMathType is 0 KEEP_DTYPE, which atlas-training"),
    Call("training-hf32", *SQUARE, f"{TRAINING} --cube-math-type 3", "cubeMathType is 3 USE_HF32, which atlas-"),
    Call(
        "training-override",
        *SQUARE,
        f"{TRAINING} --cube-math-type 1 --divisor-override 256",
        "divisorOverride is 256; expected -255 to 255 on atlas-training",
    ),
    Call(
        "inference-override",
        *SQUARE,
        "-k 2 --product atlas-inference --cube-math-type 1 --divisor-override -256",
        "divisorOverride is -256; expected -255 to 255 on atlas-inference",
    ),
    Call("override-past-int64", *SQUARE, f"-k 2 --divisor-override {2**63}", "expected an int64 on atlas-a2"),
    Call(
        "bfloat16-2",
        *SQUARE,
        "-k 2 --cube-math-type 2",
        "USE_FP16, which atlas-a2 does not take for bfloat16; expected --cube-math-type 0 KEEP_DTYPE, 1",
        self_dtype=BF16,
    ),
    Call(
        "bfloat16-3",
        *SQUARE,
        "-k 2 --cube-math-type 3",
        "USE_HF32, which atlas-a2 does not take for bfloat16",
        self_dtype=BF16,
    ),
    Call(
        "float16-3",
        *SQUARE,
        "-k 2 --cube-math-type use_hf32",
        "USE_HF32, which atlas-a2 does not take for float16",
        self_dtype=np.float16,
    ),
    Call("cube-4", *SQUARE, "-k 2 --cube-math-type 4", "cubeMathType is 4; expected one of 0 KEEP_DTYPE, 1"),
    Call("cube-negative", *SQUARE, "-k 2 --cube-math-type -1", "cubeMathType is -1; expected one of 0 KEEP"),
    Call(
        "200i-500-a2",
        *SQUARE,
        "-k 2 --product atlas-200i-500-a2",
        "aclnnAvgPool2dBackward is not supported on atlas-200i-500-a2",
    ),
    Call(
        "adaptive-200i-500-a2",
        *SQUARE,
        "--product atlas-200i-500-a2",
        "aclnnAdaptiveAvgPool2dBackward is not supported on atlas-200i-500-a2",
        "adaptive2d",
    ),
    Call("workspace", *SQUARE, "-k 2 --workspace-limit 1", "the workspace limit is 1 bytes; this call needs at"),
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.label)
def test_contract_rejects(call: Call, tmp_path: Path) -> None:
    assert call.message in call.run(tmp_path)


@pytest.mark.parametrize("override", [2**32, 2**63 - 1, -(2**63)])
def test_large_divisor_override_is_legal_and_whole(override: int, tmp_path: Path) -> None:
    grad_output = save(tmp_path / "g.npy", np.full((1, 1, 1, 1), 2.0**40, np.float32))
    own = zeros(tmp_path / "x.npy", (1, 1, 2, 2))
    out = tmp_path / "out.npy"
    assert poolgrad("avg2d", grad_output, own, "-o", out, "-k", 2, "--divisor-override", override).code == 0
    assert np.load(out).tolist() == [[[[float(np.float32(2.0**40 / override))] * 2] * 2]]


def test_a_limit_of_the_workspace_names_the_least_that_would_do(tmp_path: Path) -> None:
    grad_output, own = zeros(tmp_path / "g.npy", (1, 1, 2, 2)), zeros(tmp_path / "x.npy", (1, 1, 4, 4))
    call = ["avg2d", grad_output, own, "-o", tmp_path / "out.npy", "-k", 2, "--workspace-limit"]
    least = int(poolgrad(*call, 1, "--json").record["message"].rsplit(" ", 1)[1])
    assert poolgrad(*call, least - 1).code == 2
    assert poolgrad(*call, least, "--json").record["workspace_bytes"] <= least


# ---- Files


def npy(shape: str, descr: str = "'<f4'", data: bytes = b"", order: str = "False") -> bytes:
    header = f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + data


def safetensors(tensors: dict[str, Any], data: bytes) -> bytes:
    header = json.dumps(tensors).encode()
    return struct.pack("<Q", len(header)) + header + data


def entry(shape: list[int], start: int, stop: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def two(start: int, stop: int) -> dict[str, Any]:
    """A sound tensor of 16 bytes, and one that is not where it should be."""
    return {"a": entry([2, 2], 0, 16), "b": entry([2, 2], start, stop)}


PICKLED = b"\x80\x04\x95\x0f\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x94\x8c\x06system\x94\x93\x94."
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
WHOLE = {"a": entry([1, 1, 2, 2], 0, 16)}

FILES = [
    ("empty.npy", b"", "is empty"),
    ("header-only.npy", npy("(1, 1, 2, 2)", data=bytes(16))[:40], "is cut short inside its header"),
    ("short.npy", npy("(1, 1, 2, 2)", data=bytes(8)), "is cut short: its header promises"),
    ("4EiB.npy", npy("(4611686018427387904,)", "'|u1'"), "is cut short: its header promises 46116860184273879"),
    ("objects.npy", npy("(1, 1, 2, 2)", "'|O'", PICKLED), "object array"),
    ("pickle.npy", PICKLED, "looks like a Python pickle, which poolgrad never loads"),
    ("np-int64.npy", npy("(np.int64(1), 1, 2, 2)", data=bytes(16)), "cannot understand the .npy header"),
    ("empty.safetensors", b"", "is empty"),
    ("two-bytes.safetensors", b"\x08\x00", "2 bytes"),
    ("2^60.safetensors", struct.pack("<Q", 2**60) + b"{}", f"a header of {2**60} bytes"),
    ("html.safetensors", b"<!DOCTYPE html><html><body>Not found</body></html>", "looks like an HTML page"),
    ("lfs.safetensors", LFS_POINTER, "looks like a git-lfs pointer"),
    ("json.safetensors", struct.pack("<Q", 8) + b"{'a': 1}", "is not valid JSON"),
    (
        "offsets.safetensors",
        safetensors({"a": entry([1000, 1000], 0, 4)}, bytes(4)),
        "shape [1000, 1000] of dtype F32 is 4000000 bytes, its data_offsets [0, 4] hold 4",
    ),
    ("overlap.safetensors", safetensors(two(8, 24), bytes(24)), "'b' overlaps the tensor before it"),
    ("hole.safetensors", safetensors(two(20, 36), bytes(36)), "'b' follows a hole"),
    ("4-missing.safetensors", safetensors(WHOLE, bytes(12)), "is cut short"),
    ("4-too-many.safetensors", safetensors(WHOLE, bytes(20)), "has 4 bytes too many"),
]


@pytest.mark.parametrize("role", ["grad_output", "self"])
@pytest.mark.parametrize(("name", "content", "reason"), FILES, ids=[name for name, _, _ in FILES])
def test_damaged_file(name: str, content: bytes, reason: str, role: str, tmp_path: Path) -> None:
    bad = tmp_path / name
    bad.write_bytes(content)
    good = zeros(tmp_path / "good.npy", (1, 1, 2, 2))
    inputs = [bad, good] if role == "grad_output" else [good, bad]
    message = refused(tmp_path, 3, "FILE", None, "adaptive2d", *inputs, "-o", tmp_path / "out.npy", "--bf16-bits")
    assert str(bad) in message
    assert reason in message
    assert bad.read_bytes() == content


def file_refusal(tmp_path: Path, grad_output: object, output: object = "out.npy") -> str:
    own = zeros(tmp_path / "good.npy", (1, 1, 2, 2))
    arguments = ["adaptive2d", grad_output, own, "-o", tmp_path / str(output)]
    return refused(tmp_path, 3, "FILE", None, *arguments)


def test_fp8_tensor(tmp_path: Path) -> None:
    path = tmp_path / "fp8.safetensors"
    path.write_bytes(safetensors({"weights": entry([1, 1, 2, 2], 0, 4, "F8_E4M3")}, bytes(4)))
    message = file_refusal(tmp_path, f"{path}:weights")
    assert "weights" in message
    assert "F8_E4M3" in message


def test_directory(tmp_path: Path) -> None:
    (tmp_path / "folder.npy").mkdir()
    assert "folder.npy: it is a directory" in file_refusal(tmp_path, tmp_path / "folder.npy")


def test_missing_file(tmp_path: Path) -> None:
    assert "nowhere.npy: No such file" in file_refusal(tmp_path, tmp_path / "nowhere.npy")


UNPRIVILEGED = """
import contextlib, io, os, sys
from poolgrad.cli.main import run
from poolgrad.cli.start import entry_point
with contextlib.redirect_stderr(io.StringIO()):  # Import everything while that is allowed.
    run(["avg2d", "missing.npy", "missing.npy", "-o", "missing.npy", "-k", "1"])
if os.geteuid() == 0:  # root may read and write everything
    os.setgid(65534)
    os.setuid(65534)
sys.exit(entry_point())
"""


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that other users can reach, which pytest's own are not."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o777)
        yield Path(name)


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX permissions")
def test_unreadable_file(public: Path) -> None:
    inputs = [zeros(public / name, (1, 1, 2, 2)) for name in ("g.npy", "x.npy")]
    inputs[0].chmod(0)
    command = ["avg2d", *inputs, "-k", "1", "-o", public / "out.npy"]
    result = poolgrad_process(*command, code=UNPRIVILEGED)
    assert (result.code, result.out) == (3, "")
    assert result.error == f"poolgrad avg2d: cannot read {inputs[0]}: Permission denied"
    assert not (public / "out.npy").exists()


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX permissions")
def test_output_into_read_only_directory(public: Path) -> None:
    inputs = [zeros(public / name, (1, 1, 2, 2)) for name in ("g.npy", "x.npy")]
    folder = public / "locked"
    folder.mkdir(mode=0o555)
    command = ["avg2d", *inputs, "-k", "1", "-o", folder / "out.npy"]
    result = poolgrad_process(*command, code=UNPRIVILEGED)
    assert (result.code, result.out) == (3, "")
    assert result.error == f"poolgrad avg2d: cannot write {folder / 'out.npy'}: Permission denied"
    assert os.listdir(folder) == []


@pytest.mark.parametrize("name", ["tensor.bin", "tensor", "tensor.npz", "tensor.pth"])
def test_unknown_extension(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(bytes(64))
    assert "expected a .npy, .safetensors or .pt file" in file_refusal(tmp_path, tmp_path / name)
    assert "expected a .npy or .safetensors file" in file_refusal(tmp_path, tmp_path / "good.npy", "out.bin")


def test_unknown_tensor_name(tmp_path: Path) -> None:
    array = np.zeros((1, 1, 2, 2), np.float32)
    path = save_safetensors(tmp_path / "two.safetensors", {"left": array, "right": array})
    message = file_refusal(tmp_path, f"{path}:middle")
    assert "no tensor 'middle'; it has left, right" in message


def test_no_name_where_none_is_well_known(tmp_path: Path) -> None:
    array = np.zeros((1, 1, 2, 2), np.float32)
    path = save_safetensors(tmp_path / "two.safetensors", {"left": array, "right": array})
    message = file_refusal(tmp_path, path)
    assert "It has left, right" in message
    assert "two.safetensors:NAME" in message


def test_output_into_missing_directory(tmp_path: Path) -> None:
    zeros(tmp_path / "good.npy", (1, 1, 2, 2))
    message = file_refusal(tmp_path, tmp_path / "good.npy", "nowhere/out.npy")
    assert "nowhere/out.npy" in message
    assert "no directory" in message


def same_name(path: Path) -> Path:
    return path


def hard_link(path: Path) -> Path:
    link = path.with_name("hard.npy")
    os.link(path, link)
    return link


def symlink(path: Path) -> Path:
    link = path.with_name("soft.npy")
    link.symlink_to(path)
    return link


@pytest.mark.parametrize("role", ["grad_output", "self"])
@pytest.mark.parametrize("alias", [same_name, hard_link, symlink])
def test_output_is_an_input(alias: Callable[[Path], Path], role: str, tmp_path: Path) -> None:
    inputs = [zeros(tmp_path / name, (1, 1, 2, 2)) for name in ("g.npy", "x.npy")]
    used = inputs[["grad_output", "self"].index(role)]
    content = used.read_bytes()
    message = refused(tmp_path, 3, "FILE", None, "adaptive2d", *inputs, "-o", alias(used))
    assert f"it is the input {used}" in message
    assert used.read_bytes() == content


LIMITED = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
from poolgrad.cli.start import entry_point
sys.exit(entry_point())
"""


def check_old_file_kept(result: Result, out: Path, before: list[str]) -> None:
    assert result.code == 3
    assert str(out) in result.error
    assert out.read_bytes() == b"old"
    assert sorted(os.listdir(out.parent)) == before


@pytest.mark.skipif(os.name != "posix", reason="needs a limit on the size of files")
def test_no_room_for_the_output(tmp_path: Path) -> None:
    grad_output, own = zeros(tmp_path / "g.npy", (1, 1, 1, 1)), zeros(tmp_path / "x.npy", (1, 1, 64, 64))
    out = tmp_path / "out.npy"
    out.write_bytes(b"old")
    before = sorted(os.listdir(tmp_path))
    result = poolgrad_process("adaptive2d", grad_output, own, "-o", out, code=LIMITED)
    check_old_file_kept(result, out, before)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_full_stdout(tmp_path: Path) -> None:
    grad_output, own = zeros(tmp_path / "g.npy", (1, 1, 1, 1)), zeros(tmp_path / "x.npy", (1, 1, 4, 4))
    code = "import os, sys; os.dup2(os.open('/dev/full', os.O_WRONLY), 1); sys.stdout = open(1, 'w')\n"
    for flags in ([], ["--json"]):
        command = ["adaptive2d", grad_output, own, "-o", tmp_path / "out.npy", *flags]
        result = poolgrad_process(*command, code=code + ENTRY)
        assert (result.code, result.out) == (3, "")
        assert result.error == "poolgrad adaptive2d: standard output: No space left on device"
