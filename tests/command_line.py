"""What the tests of the command line share: running it, and tensor files made and read without poolgrad."""

from __future__ import annotations

import io
import json
import os
import struct
import subprocess
import sys
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.cases import NUMPY

from poolgrad.cli.main import run

Array = NDArray[Any]

SAFETENSORS_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64", "int32": "I32"}

ENTRY = "import sys; from poolgrad.cli.start import entry_point; sys.exit(entry_point())"


@dataclass(frozen=True)
class Result:
    """What a command line left behind."""

    code: int
    out: str
    err: str

    @property
    def record(self) -> dict[str, Any]:
        """stdout as the one line of JSON that it must be."""
        assert self.out.count("\n") == 1
        assert self.out.endswith("\n")
        loaded = json.loads(self.out)
        assert isinstance(loaded, dict)
        return loaded

    @property
    def error(self) -> str:
        """stderr as the one line that it must be."""
        assert self.err.count("\n") == 1, self.err
        assert self.err.endswith("\n")
        return self.err.rstrip("\n")


def poolgrad(*arguments: object) -> Result:
    """Run a command line in this process."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="\n") for _ in range(2))
    with redirect_stdout(out), redirect_stderr(err):
        code = run([os.fspath(item) if isinstance(item, Path) else str(item) for item in arguments])
    texts = []
    for stream in (out, err):
        stream.flush()
        buffer = stream.buffer
        assert isinstance(buffer, io.BytesIO)
        texts.append(buffer.getvalue().decode())
    return Result(code, *texts)


def environment(**changes: str) -> dict[str, str]:
    """The environment of a process without what would change its output, and with `changes`."""
    unwanted = {"COLUMNS", "NO_COLOR", "FORCE_COLOR", "POOLGRAD_DEBUG"}
    return {name: value for name, value in os.environ.items() if name not in unwanted} | changes


def poolgrad_process(*arguments: object, code: str = ENTRY, **changes: str) -> Result:
    """Run a command line in a process of its own, its output in pipes."""
    words = [item if isinstance(item, bytes) else os.fsencode(str(item)) for item in arguments]
    command: list[str | bytes] = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, env=environment(**changes), capture_output=True, timeout=60, check=False)
    return Result(done.returncode, done.stdout.decode(), done.stderr.decode())


def on_terminal(stream: str, *arguments: object, code: str = ENTRY, **changes: str) -> tuple[int, str]:
    """Run with stdout or stderr on a terminal of 80 columns; the exit code and what the terminal got."""
    pty = pytest.importorskip("pty")
    termios = pytest.importorskip("termios")
    primary, secondary = pty.openpty()
    termios.tcsetwinsize(secondary, (24, 80))
    streams: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, stream: secondary}
    env = environment(TERM="xterm-256color", **changes)
    command = [sys.executable, "-c", code, *map(str, arguments)]
    with subprocess.Popen(command, stdin=secondary, env=env, **streams) as process:
        os.close(secondary)
        seen = b""
        while chunk := _read_terminal(primary):
            seen += chunk
        os.close(primary)
    return process.returncode, seen.decode().replace("\r\n", "\n")


def _read_terminal(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # Linux's end of file of a terminal
        return b""


def save(path: Path, array: Array) -> Path:
    """Write a tensor as .npy (bfloat16 as <V2) or as the only one of a .safetensors file."""
    if path.suffix == ".npy":
        np.save(path, array)
    else:
        save_safetensors(path, {"tensor": array})
    return path


def save_safetensors(path: Path, tensors: Mapping[str, Array]) -> Path:
    """Write a .safetensors file by its definition: the header's length, the header, the data."""
    header: dict[str, Any] = {}
    data = b""
    for name, array in tensors.items():
        content = array.tobytes()
        header[name] = {
            "dtype": SAFETENSORS_NAMES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + len(content)],
        }
        data += content
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def load(path: Path, dtype: str = "float32", name: str = "grad_input") -> Array:
    """Read a tensor that poolgrad wrote, which must have this dtype (and this name in a .safetensors file)."""
    content = path.read_bytes()
    if path.suffix == ".npy":
        array = np.load(io.BytesIO(content))
        if dtype == "bfloat16":
            assert array.dtype == np.dtype("V2")
            return np.asarray(array.view(NUMPY[dtype]))
        assert array.dtype == NUMPY[dtype]
        return np.asarray(array)
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__", None)
    assert list(header) == [name]
    assert header[name]["dtype"] == SAFETENSORS_NAMES[dtype]
    start, stop = header[name]["data_offsets"]
    assert (start, stop) == (0, len(content) - 8 - length)
    return np.frombuffer(content[8 + length :], NUMPY[dtype]).reshape(header[name]["shape"])


def zeros(path: Path, shape: tuple[int, ...], dtype: Any = np.float32) -> Path:
    """A file of zeros."""
    return save(path, np.zeros(shape, dtype))
