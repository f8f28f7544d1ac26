"""What an installation puts where; the builds themselves are tried by `.ci/run`."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import poolgrad.cli
import poolgrad.core

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_version_is_the_projects() -> None:
    assert metadata.version("poolgrad") == PROJECT["version"]


def test_command_is_the_error_boundary() -> None:
    entries = metadata.distribution("poolgrad").entry_points
    (command,) = (entry for entry in entries if entry.group == "console_scripts")
    assert command.name == "poolgrad"
    assert callable(command.load())


@pytest.mark.parametrize("package", [poolgrad.core, poolgrad.cli], ids=["core", "cli"])
def test_types_are_published(package: object) -> None:
    (folder,) = package.__path__  # type: ignore[attr-defined]
    assert Path(folder, "py.typed").is_file()


def test_nothing_but_poolgrad_at_top_level(tmp_path: Path) -> None:
    # From a folder that is no checkout, else its core/ and cli/ would be found.
    code = "import importlib.util as u; print([n for n in ('core', 'cli', 'fixtures') if u.find_spec(n)])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


def test_poolgrad_is_a_namespace() -> None:
    spec = importlib.util.find_spec("poolgrad")
    assert spec is not None
    assert spec.origin is None


def test_installed_metadata_declares_the_dependencies() -> None:
    declared = {requirement.split(";")[0].strip() for requirement in metadata.requires("poolgrad") or ()}
    for dependency in PROJECT["dependencies"]:
        assert normal(dependency) in map(normal, declared)


def test_every_dependency_has_a_lower_bound() -> None:
    assert all(dependency.count(">=") == 1 for dependency in PROJECT["dependencies"])


def normal(requirement: str) -> str:
    return requirement.lower().replace("_", "-").replace(" ", "")
