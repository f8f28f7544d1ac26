"""Folders of an msprobe dump: `stepN/{rankN|rank|procPID}/dump.json`, with the tensors in `dump_tensor_data/`.

A folder whose dump.json is missing, cut short or does not list what lies in `dump_tensor_data` is a dump that
crashed: its calls are known by their files' names alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

from .dump_calls import PoolCall, Unchecked, calls_of
from .dump_json import EntryName, TensorRecord, read_dump
from .file_errors import FileError, cannot

TENSORS = "dump_tensor_data"
_STEP = re.compile(r"step[0-9]+")
_RANK = re.compile(r"rank[0-9]*|proc[0-9]+")


@dataclass(frozen=True)
class Folder:
    """One process's dump of one step; rank: how reports name it."""

    path: str
    rank: str

    def file(self, record: TensorRecord) -> str:
        """The path of a tensor that was stored."""
        assert record.file is not None
        return os.path.join(self.path, TENSORS, record.file)


def folders_in(directory: str) -> list[Folder]:
    """The folders of a step, those of all steps of a dump, or the one that is given itself."""
    if not os.path.isdir(directory):
        there = os.path.lexists(directory)
        raise cannot("read", directory, "it is no directory" if there else "there is no such directory")
    if _is_folder(directory):
        return [Folder(directory, os.path.basename(os.path.abspath(directory)))]
    found = _ranks(directory, "")
    for step in _matching(directory, _STEP):
        found += _ranks(os.path.join(directory, step), f"{step}/")
    if not found:
        raise FileError(f"{directory} is no msprobe dump: it has no dump.json and no folder rankN, rank or procPID")
    return found


def _ranks(step: str, prefix: str) -> list[Folder]:
    return [Folder(os.path.join(step, name), prefix + name) for name in _matching(step, _RANK)]


def _matching(directory: str, pattern: re.Pattern[str]) -> list[str]:
    """Folders by name, in the order of their numbers."""
    try:
        with os.scandir(directory) as entries:
            names = [entry.name for entry in entries if pattern.fullmatch(entry.name) and entry.is_dir()]
    except OSError as error:
        raise cannot("read", directory, error) from error
    return sorted(names, key=lambda name: (name.rstrip("0123456789"), len(name), name))


def _is_folder(directory: str) -> bool:
    names = ("dump.json", TENSORS)
    return any(os.path.lexists(os.path.join(directory, name)) for name in names)


def calls_in(folder: Folder) -> Iterator[PoolCall | Unchecked]:
    """The backward calls of a folder, those of a crashed dump among them."""
    path = os.path.join(folder.path, "dump.json")
    reason = "dump.json does not list it: the run that dumped it crashed"
    found: list[PoolCall | Unchecked] = []
    unreadable = False
    try:
        found = list(calls_of(read_dump(path)))
    except FileError as error:
        unreadable = True
        reason = str(error) if os.path.lexists(path) else "dump.json is missing: the run that dumped it crashed"
    yield from found
    lost = _unlisted(folder, {one.name for one in found})
    if unreadable and not lost:
        lost = ["dump.json"]
    for name in lost:
        yield Unchecked(name, reason)


def _unlisted(folder: Folder, known: set[str]) -> list[str]:
    """Backward calls whose tensors are there, but not their entries."""
    try:
        names = sorted(os.listdir(os.path.join(folder.path, TENSORS)))
    except OSError:
        return []  # Statistics mode has no such folder.
    found: dict[str, None] = {}
    for name in map(EntryName.of_file, names):
        if name and name.call not in known and (name.direction == "backward" or name.prefix == "Aten"):
            found[name.call] = None
    return sorted(found, key=_by_number)


def _by_number(call: str) -> tuple[str, int]:
    api, _, number = call.rpartition(".")
    return api, int(number)
