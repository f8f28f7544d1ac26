"""Print the lower bounds of the run-time dependencies, and of Dask, as exact versions, for `pip --constraint`."""

import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
for dependency in project["dependencies"] + project["optional-dependencies"]["dask"]:
    name, bound = dependency.split(">=")
    print(f"{name}=={bound}")
