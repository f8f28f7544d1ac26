"""`FILE` or `FILE.safetensors:NAME` taken apart, and the file opened. Free of numpy."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from typing import NamedTuple

from .file_errors import FileError, cannot, shorten
from .positioned_io import PositionedFile

_NAMES_SHOWN = 10


class Identity(NamedTuple):
    """What tells a file, and its content, from another: any of it differs when the file has changed."""

    device: int
    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Identity:
        """The identity behind a stat result."""
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


READ, WRITTEN = "a .npy, .safetensors or .pt file", "a .npy or .safetensors file"
"""What is expected of paths."""


def split(text: str, expected: str = READ) -> tuple[str, str | None, str]:
    """Path, tensor name, and the path's extension. A file that exists by the whole text wins."""
    if "\0" in text:
        raise FileError(f"{text}: a path cannot hold a NUL character")
    path, name = text, None
    lowered = text.lower()
    if not os.path.lexists(text):
        for position in _occurrences(lowered, ".safetensors:"):
            end = position + len(".safetensors")
            if name is None or os.path.lexists(text[:end]):
                path, name = text[:end], text[end + 1 :]
            if os.path.lexists(path):
                break
    extension = os.path.splitext(path)[1].lower()
    if extension not in (".npy", ".safetensors", ".pt"):
        hint = "; an .npy file holds one tensor, without a name" if ".npy:" in lowered else ""
        raise FileError(f"{text or 'an empty path'}: expected {expected}{hint}")
    return path, name, extension


def open_regular(path: str) -> tuple[PositionedFile, os.stat_result]:
    """Open for reading; anything but a regular file is refused first, for opening a pipe would hang."""
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            raise cannot("read", path, "it is a directory")
        if not stat.S_ISREG(mode):
            raise cannot("read", path, "it is not a regular file")
        flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
        descriptor = os.open(path, flags)
        return PositionedFile(descriptor, path), os.fstat(descriptor)
    except OSError as error:
        raise cannot("read", path, error) from error


def no_such_tensor(path: str, name: str, there: Iterable[str]) -> FileError:
    """The error for a tensor name that is not in a file, with those that are."""
    return FileError(f"{path} has no tensor '{shorten(name)}'; it has {listed(there)}")


def listed(names: Iterable[str]) -> str:
    """Some names of tensors for a message, and how many more there are."""
    names = list(names)
    shown = ", ".join(shorten(name, 60) for name in names[:_NAMES_SHOWN])
    rest = len(names) - _NAMES_SHOWN
    return (shown or "no tensors") + (f" and {rest} more" if rest > 0 else "")


def _occurrences(text: str, part: str) -> Iterable[int]:
    position = text.find(part)
    while position >= 0:
        yield position
        position = text.find(part, position + 1)
