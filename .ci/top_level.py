"""Fail when the installed distribution puts anything but poolgrad (and its command) into the environment."""

import sys
from importlib import metadata

distribution = metadata.distribution("poolgrad")
own = ("poolgrad/core/", "poolgrad/cli/", f"poolgrad-{distribution.version}.dist-info/")
paths = [path.as_posix() for path in distribution.files or ()]
strangers = [path for path in paths if not path.startswith(own) and path.rsplit("/", 1)[-1] != "poolgrad"]
missing = {"poolgrad/core/py.typed", "poolgrad/cli/py.typed"} - set(paths)
if not paths or strangers or missing:
    sys.exit(f"beyond poolgrad: {strangers}; missing: {sorted(missing)}")
