"""Reads and writes at a place of an open file, from several threads at once."""

from __future__ import annotations

import os
import threading

from .file_errors import FileError, cannot

_MOST = 1 << 24
"""Bytes of one call: a signal has to wait until it is over."""


class PositionedFile:
    """An open file descriptor; `path` is what messages call it.

    Where the system lacks preadv or pwrite, a lock keeps the seek and the read or write together.
    """

    def __init__(self, descriptor: int, path: str) -> None:
        self.path = path
        self.descriptor = descriptor
        self._lock = threading.Lock()
        self._closed = False

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill `view` (of bytes) from `offset` on; a file that ends before that is a FileError."""
        try:
            while len(view):
                count = self._read_some(offset, view[:_MOST])
                if count == 0:
                    raise FileError(f"{self.path} was cut short while it was read")
                offset, view = offset + count, view[count:]
        except OSError as error:
            raise cannot("read", self.path, error) from error

    def read_bytes(self, offset: int, count: int) -> bytes:
        """`count` bytes from `offset` on."""
        data = bytearray(count)
        self.read_into(offset, memoryview(data))
        return bytes(data)

    def write_from(self, offset: int, view: memoryview) -> None:
        """Write all of `view` (of bytes) from `offset` on."""
        try:
            while len(view):
                count = self._write_some(offset, view[:_MOST])
                offset, view = offset + count, view[count:]
        except OSError as error:
            raise cannot("write", self.path, error) from error

    def close(self) -> None:
        """Close once; some file systems report a failed write only here."""
        if not self._closed:
            self._closed = True
            os.close(self.descriptor)

    def _read_some(self, offset: int, view: memoryview) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self.descriptor, [view], offset)
        with self._lock:
            os.lseek(self.descriptor, offset, os.SEEK_SET)
            data = os.read(self.descriptor, len(view))
        view[: len(data)] = data
        return len(data)

    def _write_some(self, offset: int, view: memoryview) -> int:
        if hasattr(os, "pwrite"):
            return os.pwrite(self.descriptor, view, offset)
        with self._lock:
            os.lseek(self.descriptor, offset, os.SEEK_SET)
            return os.write(self.descriptor, view)
