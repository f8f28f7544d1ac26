"""A new file that takes its target's place only when it is complete.

Until then it has no name at all, where the system offers that (O_TMPFILE), or one that tells whose it is. Its
space is claimed before the work starts, so that a full disk is found first. It is not flushed to the disk
(fsync): the promise is about a killed process, not about a power cut, and that would take half as long again as
writing the file (256 MB, measured).
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import weakref

from .file_errors import cannot
from .positioned_io import PositionedFile

_ZEROS = bytes(1 << 20)
_CLAIM = 1 << 26
_NO_FALLOCATE = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENODEV}


class NewFile:
    """Opened on construction; ends with `commit` or `discard`. `path` is the target as the user gave it."""

    def __init__(self, path: str, size: int) -> None:
        self.path = path
        self._target, mode = _replaceable(path)
        folder, name = os.path.split(self._target)
        # The middle is cut, for a name may be as long as the file system takes.
        unique = f".{name[:50]}.poolgrad-{os.getpid()}-{os.urandom(4).hex()}.tmp"
        self._temporary = os.path.join(folder, unique)
        # From before it exists on, for a signal may cut in anywhere: it runs when nobody holds this object any
        # more, at the interpreter's end if need be.
        self._remove = weakref.finalize(self, _remove, self._temporary, os.getpid())
        self._unnamed = False
        self._file = PositionedFile(self._open(folder), path)
        try:
            if mode is not None and hasattr(os, "fchmod"):
                os.fchmod(self._file.descriptor, mode)
            self._claim(size)
        except OSError as error:
            self.discard()
            raise cannot("write", path, error) from error
        except BaseException:
            self.discard()
            raise

    def write(self, offset: int, view: memoryview) -> None:
        """Write bytes at their place; threads may do so at once."""
        self._file.write_from(offset, view)

    def commit(self) -> None:
        """Take the target's place."""
        try:
            if self._unnamed:
                self._name_it()
            else:
                self._file.close()
                os.replace(self._temporary, self._target)
        except OSError as error:
            raise cannot("write", self.path, error) from error
        finally:
            self.discard()

    def discard(self) -> None:
        """Leave nothing behind; without effect after `commit`."""
        with contextlib.suppress(OSError):
            self._file.close()
        self._remove()

    def _open(self, folder: str) -> int:
        """Without a name if possible, which needs /proc to give it one later."""
        if hasattr(os, "O_TMPFILE"):
            with contextlib.suppress(OSError):
                descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o666)
                if os.path.exists(_proc_path(descriptor)):
                    self._unnamed = True
                    return descriptor
                os.close(descriptor)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
        try:
            return os.open(self._temporary, flags, 0o666)
        except OSError as error:
            raise cannot("write", self.path, error) from error

    def _name_it(self) -> None:
        """Give the unnamed file the target's name: at once, or, where an old file has it, by way of another.

        A process killed between the two steps of the second way leaves the complete file under that other name.
        """
        # Some file systems report a failed write only when a descriptor is closed, and this one is still needed.
        os.close(os.dup(self._file.descriptor))
        try:
            self._link(self._target)
        except FileExistsError:
            self._link(self._temporary)
            os.replace(self._temporary, self._target)

    def _link(self, name: str) -> None:
        # src_dir_fd means nothing to an absolute path, but makes Python call linkat, which follows the link of
        # /proc; plain link would not.
        descriptor = self._file.descriptor
        os.link(_proc_path(descriptor), name, src_dir_fd=descriptor, follow_symlinks=True)

    def _claim(self, size: int) -> None:
        """Claim the file's space; where the system can't, by writing zeros."""
        try:
            if hasattr(os, "posix_fallocate") and self._allocate(size):
                return
        except OSError as error:
            raise cannot("write", self.path, f"{error.strerror} ({size} bytes are needed)") from error
        for offset in range(0, size, len(_ZEROS)):
            self._file.write_from(offset, memoryview(_ZEROS)[: size - offset])

    def _allocate(self, size: int) -> bool:
        """False where the file system has no such call.

        In steps, for on some the C library writes to every block instead, and a signal has to wait for the end of
        a call; but all at once where there seems to be too little room, for then it should not be filled first.
        """
        room = os.fstatvfs(self._file.descriptor)
        step = _CLAIM if size <= room.f_bavail * room.f_frsize else size
        try:
            for offset in range(0, size, step):
                os.posix_fallocate(self._file.descriptor, offset, min(step, size - offset))
        except OSError as error:
            if error.errno in _NO_FALLOCATE:
                return False
            raise
        return True


def _remove(temporary: str, owner: int) -> None:
    if os.getpid() == owner:  # Not in a fork.
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def _proc_path(descriptor: int) -> str:
    return f"/proc/self/fd/{descriptor}"


def check_target(path: str) -> None:
    """Refuse what a `NewFile` of this path would refuse before it takes any space. Writes nothing."""
    folder = os.path.dirname(_replaceable(path)[0])
    if not os.access(folder, os.W_OK | os.X_OK):
        raise cannot("write", path, f"nothing can be written to the directory {folder}")


def _replaceable(path: str) -> tuple[str, int | None]:
    """The file that is to be replaced, where links lead to, and its permission bits if there is one."""
    try:
        target = os.path.realpath(path)
    except OSError as error:  # A relative path, in a directory that has vanished.
        raise cannot("write", path, error) from error
    mode, folder = _replaceable_mode(path, target), os.path.dirname(target)
    if not os.path.isdir(folder):
        raise cannot("write", path, f"there is no directory {folder}")
    return target, mode


def _replaceable_mode(path: str, target: str) -> int | None:
    """The permission bits of the file that is to be replaced; None when there is none yet."""
    try:
        status = os.stat(target)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise cannot("write", path, error) from error
    if stat.S_ISDIR(status.st_mode):
        raise cannot("write", path, "it is a directory")
    if not stat.S_ISREG(status.st_mode):
        raise cannot("write", path, "it is not a regular file")
    if not os.access(target, os.W_OK):
        read_only = hasattr(os, "statvfs") and os.statvfs(target).f_flag & os.ST_RDONLY
        what = "its file system" if read_only else "the file that is there"
        raise cannot("write", path, f"{what} is read-only")
    return stat.S_IMODE(status.st_mode) & 0o777
