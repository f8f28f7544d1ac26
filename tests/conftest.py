"""The surroundings that the tests expect, however they are started."""

import os
import signal

# pytest-xdist gives its workers a width, and some shells export theirs: reports would be folded to it.
os.environ.pop("COLUMNS", None)

# A shell's background jobs have SIGINT ignored, and every process that a test starts would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
