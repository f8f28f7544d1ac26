"""The one exception for anything wrong with a file, and text that is safe to show on a terminal.

Free of numpy, so that the error boundary can know it at no cost.
"""

from __future__ import annotations

_KINDS = (
    (b"\x93NUMPY", "an .npy file"),
    (b"PK\x03\x04", "a zip archive (.npz or .pt)"),
    (b"\x80", "a Python pickle, which poolgrad never loads"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"\x89HDF", "an HDF5 file"),
    (b"version https://git-lfs", "a git-lfs pointer (`git lfs pull` fetches the data)"),
    (b"<", "an HTML page or XML"),
)


def printable(text: str) -> str:
    r"""Text with control characters, escape sequences, line ends and undecodable bytes escaped.

    >>> printable("a\x1b[31m\nb")
    'a\\x1b[31m\\nb'
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode("ascii")
        for char in text
    )


def shorten(text: str, limit: int = 80) -> str:
    """Printable text of at most about `limit` characters: names and headers can be megabytes long."""
    text = printable(text[: limit + 1])
    return text if len(text) <= limit else text[:limit] + "..."


class FileError(Exception):
    """A file that cannot be read or written: `str()` is one line with the path and the reason."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


def cannot(verb: str, path: str, reason: OSError | str) -> FileError:
    """The error "cannot read|write PATH: reason", with the system's own words for an OSError."""
    if isinstance(reason, OSError):
        reason = reason.strerror or str(reason)
    return FileError(f"cannot {verb} {path}: {reason}")


def looks_like(head: bytes) -> str:
    """What a file that is not what its name says seems to be, from its first bytes; "" when unknown."""
    start = head.lstrip() if head.lstrip()[:1] == b"<" else head
    for magic, kind in _KINDS:
        if start.startswith(magic):
            return f"; it looks like {kind}"
    return "; it looks like a safetensors file" if head[8:9] == b"{" else ""
