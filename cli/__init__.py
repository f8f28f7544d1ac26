"""poolgrad at the shell: flags to arguments, files to tiles, results to reports."""
