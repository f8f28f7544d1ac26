"""Print the declared lower bound of every run-time dependency as an exact version, for `pip --constraint`."""

import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
for dependency in project["dependencies"]:
    name, bound = dependency.split(">=")
    print(f"{name}=={bound}")
