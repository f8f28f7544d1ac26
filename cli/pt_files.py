"""A tensor in a .pt file: torch reads the description (never the pickle's code), the elements are read in place.

Takes the optional extra `torch`. `torch.save` stores the elements as they are in a zip archive, at an offset that
the archive tells: from there they are read tile by tile, as from any other file.
"""

from __future__ import annotations

import importlib
import os
import struct
import warnings
import zipfile
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from .file_errors import FileError, looks_like, shorten
from .positioned_io import PositionedFile
from .tensor_layout import Layout, claimed_bytes

INSTALL = "reading it takes the extra torch: pip install 'poolgrad[torch]'"

_MOST_DESCRIPTION = 1 << 20
"""Bytes of the pickle that describes a tensor; one takes a few hundred."""
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")


def read_header(file: PositionedFile, size: int) -> Layout:
    """The tensor of a .pt file of `size` bytes, or a FileError."""
    torch = _import_torch(file.path)
    info, big_endian = _stored_elements(file, size)
    tensor = _load(torch, file.path)
    if not isinstance(tensor, torch.Tensor):
        raise FileError(f"{file.path} holds {_kind(tensor)}, expected one tensor")
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.layout != torch.strided or not tensor.is_contiguous() or tensor.storage_offset():
        raise FileError(f"{file.path} holds a tensor that is not contiguous; save tensor.contiguous().clone()")
    shape, bits = tuple(tensor.shape), 8 * tensor.element_size()
    nbytes = claimed_bytes(shape, bits)
    if nbytes is None or nbytes > info.file_size or tensor.untyped_storage().nbytes() != info.file_size:
        raise FileError(f"{file.path}: its description does not go with the {info.file_size} bytes of its elements")
    return Layout(dtype, dtype, shape, _offset(file, info, size), nbytes, big_endian, has_byte_order=bits > 8)


def _import_torch(path: str) -> Any:
    # A device's backend, which torch loads by itself, is of no use here and may fail to start.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module("torch")
    except ImportError:
        raise FileError(f"{path} is a PyTorch file; {INSTALL}") from None


def _stored_elements(file: PositionedFile, size: int) -> tuple[zipfile.ZipInfo, bool]:
    """The archive's only member with elements, and whether they are big-endian."""
    if size == 0:
        raise FileError(f"{file.path} is empty")
    try:
        with zipfile.ZipFile(file.path) as archive:
            members = archive.infolist()
            folder = next((m.filename[: -len("data.pkl")] for m in members if m.filename.endswith("/data.pkl")), None)
            if folder is None:
                raise FileError(f"{file.path} is not a file of torch.save: it has no data.pkl")
            if archive.getinfo(f"{folder}data.pkl").file_size > _MOST_DESCRIPTION:
                raise FileError(f"{file.path}: its data.pkl is too long for one tensor")
            stored = [member for member in members if member.filename.startswith(f"{folder}data/")]
            if len(stored) != 1:
                raise FileError(f"{file.path} holds {len(stored)} tensors' elements, expected those of one tensor")
            if stored[0].compress_type != zipfile.ZIP_STORED or stored[0].flag_bits & 1:
                raise FileError(f"{file.path} is compressed, which torch.save never does")
            return stored[0], _is_big_endian(archive, f"{folder}byteorder")
    except FileError:
        raise
    except OSError as error:
        raise FileError(f"cannot read {file.path}: {error.strerror or error}") from error
    except Exception as error:  # zipfile raises nearly anything on damaged archives.
        start = file.read_bytes(0, min(size, 64))
        if start.startswith(b"PK"):
            raise FileError(f"{file.path} is cut short or damaged: {shorten(str(error))}") from None
        raise FileError(
            f"{file.path} is not a file of torch.save (of torch 1.6 or later){looks_like(start)}"
        ) from None


def _is_big_endian(archive: zipfile.ZipFile, name: str) -> bool:
    if name not in archive.namelist():
        return False  # As torch before 2.1 wrote, on little-endian machines but for the rarest.
    with archive.open(name) as member:
        return member.read(8) == b"big"


def _offset(file: PositionedFile, info: zipfile.ZipInfo, size: int) -> int:
    """Where a member's bytes start: behind its own header, which may be longer than the archive's list says."""
    if info.header_offset + _LOCAL_HEADER.size > size:
        raise FileError(f"{file.path} is cut short or damaged: its elements are beyond its end")
    header = _LOCAL_HEADER.unpack(file.read_bytes(info.header_offset, _LOCAL_HEADER.size))
    offset = info.header_offset + _LOCAL_HEADER.size + int(header[-2]) + int(header[-1])
    if header[0] != b"PK\x03\x04" or offset + info.file_size > size:
        raise FileError(f"{file.path} is cut short or damaged: its elements are beyond its end")
    return offset


def _load(torch: Any, path: str) -> Any:
    """The tensor without its elements, which stay in the file (mmap)."""
    try:
        with warnings.catch_warnings(), _npu_names_known(torch):
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # A hostile pickle makes torch raise nearly anything.
        text = str(error)
        if "torch_npu" in text:
            raise FileError(f"{path} was saved on an NPU; reading it takes torch 2.5 or later") from None
        if "unsupported" in text.lower():
            raise FileError(f"{path} holds more than a tensor, which poolgrad never loads (weights_only)") from None
        raise FileError(f"{path} is damaged: torch cannot understand its data.pkl") from None


def _npu_names_known(torch: Any) -> AbstractContextManager[Any]:
    """Let tensors of an NPU be read without torch_npu, which stores them as a CPU's, by a function of its own."""
    safe = getattr(torch.serialization, "safe_globals", None)
    if safe is None:
        return nullcontext()

    def rebuild(storage: Any, offset: int, size: Any, stride: Any, _grad: Any, _hooks: Any, _format: Any) -> Any:
        return torch._utils._rebuild_tensor(storage, offset, size, stride)

    rebuild.__module__, rebuild.__name__ = "torch_npu.utils.storage", "_rebuild_npu_tensor"
    rebuild.__qualname__ = rebuild.__name__
    number = type("Format", (int,), {"__module__": "torch_npu.npu._format"})
    known: AbstractContextManager[Any] = safe([rebuild, number])
    return known


def _kind(value: Any) -> str:
    if isinstance(value, dict):
        return f"a dict of {len(value)}"
    return f"a {shorten(type(value).__name__, 40)}"
