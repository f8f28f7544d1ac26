"""Print the lower bounds of the dependencies, Dask and matplotlib as exact versions, for `pip --constraint`."""

import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"]
for dependency in project["dependencies"] + extras["dask"] + extras["plot"]:
    name, bound = dependency.split(">=")
    print(f"{name}=={bound}")
