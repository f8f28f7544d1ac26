"""What an msprobe dump.json says: its header, and the entries of average pooling with their arguments.

The text is walked entry by entry, and only entries of average pooling are kept: a dump of a large model has
hundreds of megabytes of others. Whatever it says is checked before it is believed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .file_errors import FileError, shorten
from .locate import open_regular

MOST_BYTES = 1 << 29
"""A longer dump.json is refused; a hundred thousand calls take about half of it."""

_MOST_AXES = 64
_MOST_NAME = 255
_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\n\r]*")

_API = re.compile(
    r"(?P<call>(?P<prefix>Functional|Torch|Mint|MintFunctional)\.(?P<api>_?adaptive_avg_pool2d|avg_pool2d)\.[0-9]{1,9})"
    r"\.(?P<direction>forward|backward)"
)
_ATEN = re.compile(
    r"(?P<call>(?P<prefix>Aten)\.(?P<api>avg_pool2d_backward|_adaptive_avg_pool2d_backward)(?:\.[a-z]\w{0,30})?\.[0-9]{1,9})"
    r"\.(?P<direction>forward)"
)
_MODULE = re.compile(r"(?P<call>(?:Module|Cell)\..{1,400}\.(?:AvgPool2d|AdaptiveAvgPool2d))\.backward\.[0-9]{1,9}")


class ArgumentError(Exception):
    """Why an entry cannot be used: `str()` is one line."""


@dataclass(frozen=True)
class TensorRecord:
    """A tensor as dump.json describes it; file: its name in `dump_tensor_data`, None where it was not stored."""

    shape: tuple[int, ...]
    dtype: str
    file: str | None

    @property
    def text(self) -> str:
        """As messages put it."""
        return f"{self.dtype} ({', '.join(map(str, self.shape))})"


Scalar = bool | int | float | str | None
Argument = TensorRecord | Scalar | tuple[Scalar, ...]


@dataclass(frozen=True)
class EntryName:
    """An entry's name: `call` is `Functional.avg_pool2d.0`, `prefix` and `api` are its parts."""

    call: str
    prefix: str
    api: str
    direction: str

    @classmethod
    def of(cls, text: str) -> EntryName | None:
        """The parts of the name of an entry of average pooling; None for any other."""
        found = _API.fullmatch(text) or _ATEN.fullmatch(text)
        return cls(**found.groupdict()) if found else None

    @classmethod
    def of_file(cls, text: str) -> EntryName | None:
        """The entry that a tensor's file belongs to, by the file's name."""
        found = _API.match(text) or _ATEN.match(text)
        return cls(**found.groupdict()) if found and text[found.end() :].startswith(".") else None


@dataclass
class Dump:
    """A dump.json: its header, the entries of average pooling by name, and the pooling modules of level L0."""

    header: dict[str, str] = field(default_factory=dict)
    entries: dict[str, Any] = field(default_factory=dict)
    modules: list[str] = field(default_factory=list)

    @property
    def is_mindspore(self) -> bool:
        """Whether the functions are MindSpore's own; mindtorch has PyTorch's."""
        if "framework" in self.header:
            return self.header["framework"] == "mindspore"
        return any('"mindspore.Tensor"' in json.dumps(entry) for entry in self.entries.values())


def read_dump(path: str) -> Dump:
    """Read a dump.json; whatever is wrong with it as a whole is a FileError."""
    text = _read_text(path)
    try:
        return _walk(_Reader(text))
    except RecursionError:
        raise FileError(f"{path} is nested too deeply for a dump.json") from None
    except ValueError as error:
        cut = "; it is cut short, as by a crash of the run that dumped it" if _is_cut(text) else ""
        raise FileError(f"{path} is not the JSON of a dump: {shorten(str(error), 120)}{cut}") from None


def _read_text(path: str) -> str:
    file, status = open_regular(path)
    try:
        if status.st_size > MOST_BYTES:
            raise FileError(f"{path} has {status.st_size} bytes; a dump.json of over {MOST_BYTES} is not read")
        data = bytearray(status.st_size)
        file.read_into(0, memoryview(data))
    finally:
        file.close()
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError as error:
        raise FileError(f"{path} is not the JSON of a dump: byte {error.start} is not UTF-8") from None


def _is_cut(text: str) -> bool:
    return text[:64].lstrip().startswith("{") and not text[-64:].rstrip().endswith("}")


def _walk(reader: _Reader) -> Dump:
    dump, has_data = Dump(), False
    for key in reader.members("the file"):
        if key == "data":
            has_data = True
            _walk_data(reader, dump)
        else:
            value = reader.value()
            if isinstance(value, str) and key in ("task", "level", "framework"):
                dump.header[key] = value
    reader.end()
    if not has_data:
        raise ValueError('it has no "data"')
    return dump


def _walk_data(reader: _Reader, dump: Dump) -> None:
    for name in reader.members('"data"'):
        entry = reader.value()
        if EntryName.of(name):
            dump.entries[name] = entry
        elif (module := _MODULE.fullmatch(name)) is not None:
            dump.modules.append(module["call"])


class _Reader:
    """Walks JSON without making objects of what it passes by."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def members(self, what: str) -> Iterator[str]:
        """The keys of the object at this place; its value is to be read, too, before the next one."""
        if self._skip_space() != "{":
            raise ValueError(f"{what} is no object")
        self._at += 1
        if self._skip_space() == "}":
            self._at += 1
            return
        while True:
            key = self.value()
            if not isinstance(key, str):
                raise ValueError(f"a key is no text at character {self._at}")
            self._take(":")
            yield key
            if self._take(",}") == "}":
                return

    def value(self) -> Any:
        """The value at this place."""
        self._skip_space()
        value, self._at = _DECODER.raw_decode(self._text, self._at)
        return value

    def end(self) -> None:
        """Nothing may follow."""
        if self._skip_space():
            raise ValueError(f"something follows its end at character {self._at}")

    def _skip_space(self) -> str:
        match = _SPACE.match(self._text, self._at)
        assert match is not None
        self._at = match.end()
        return self._text[self._at : self._at + 1]

    def _take(self, marks: str) -> str:
        found = self._skip_space()
        if not found or found not in marks:
            raise ValueError(f"expected {' or '.join(map(repr, marks))} at character {self._at}")
        self._at += 1
        return found


# ---- Entries


def argument(record: Any, name: str) -> Argument:
    """What a record of an argument stands for; `name` is what messages call it."""
    if isinstance(record, list):
        return tuple(_scalar(element, f"an element of {name}") for element in record)
    if isinstance(record, dict) and "shape" in record and "dtype" in record:
        return _tensor(record, name)
    if isinstance(record, dict) and isinstance(record.get("value"), list):
        return tuple(_plain(element, f"an element of {name}") for element in record["value"])  # torch.Size
    return _scalar(record, name)


def listed(entry: Any, key: str) -> list[Any]:
    """The list under a key of an entry; empty where it is not there."""
    records = _of_entry(entry, key, [])
    if not isinstance(records, list):
        raise ArgumentError(f'"{key}" is no list')
    return records


def named(entry: Any, key: str) -> dict[str, Any]:
    """The object under a key of an entry; empty where it is not there."""
    records = _of_entry(entry, key, {})
    if not isinstance(records, dict):
        raise ArgumentError(f'"{key}" is no object')
    return records


def _of_entry(entry: Any, key: str, otherwise: Any) -> Any:
    if not isinstance(entry, dict):
        raise ArgumentError("its entry is no object")
    found = entry.get(key)
    return otherwise if found is None else found


def _scalar(record: Any, name: str) -> Scalar:
    if record is None:
        return None
    if not isinstance(record, dict) or "value" not in record:
        raise ArgumentError(f"{name} is {_short(record)}, which no argument of average pooling is")
    return _plain(record["value"], name)


def _plain(value: Any, name: str) -> Scalar:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ArgumentError(f"{name} has the value {_short(value)}")


def _tensor(record: dict[str, Any], name: str) -> TensorRecord:
    shape, dtype, file = record["shape"], record["dtype"], record.get("data_name")
    if not isinstance(shape, list) or len(shape) > _MOST_AXES:
        raise ArgumentError(f"the shape of {name} is {_short(shape)}")
    if not all(type(extent) is int and 0 <= extent < 2**63 for extent in shape):
        raise ArgumentError(f"the shape of {name} is {_short(shape)}")
    if not isinstance(dtype, str):
        raise ArgumentError(f"the dtype of {name} is {_short(dtype)}")
    if file is not None:
        _check_file_name(file, name)
    # torch.float32 is Float32 in MindSpore.
    return TensorRecord(tuple(shape), shorten(dtype.rpartition(".")[2].lower(), 40), file)


def _check_file_name(file: Any, name: str) -> None:
    """A name in `dump_tensor_data`, and not a path that leads out of it."""
    if not isinstance(file, str) or not file or len(os.fsencode(file)) > _MOST_NAME:
        raise ArgumentError(f"the data_name of {name} is {_short(file)}")
    if file in (".", "..") or any(mark in file for mark in "/\\\0"):
        raise ArgumentError(f"the data_name of {name} is {_short(file)}, which leads out of dump_tensor_data")


def _short(value: Any) -> str:
    """A value of any size for a message: only its start is looked at."""
    if isinstance(value, str):
        return f"'{shorten(value, 60)}'"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return f"an object of {shorten(', '.join(list(value)[:5]), 60) or 'nothing'}"
    try:
        return str(value)
    except ValueError:  # Python prints no integer of over 4300 digits.
        return "an astronomical number"
