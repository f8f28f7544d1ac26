"""poolgrad at the shell: flags to arguments, files to tiles, results to reports."""

__version__ = "0.1.0"
