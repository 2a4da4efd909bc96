"""While a command's modules load, Ctrl-C ends it without a traceback; then `memplan.cli.program` answers."""

import os
import signal
import sys

if (sys.argv[:1] == ["-m"] or os.path.basename("".join(sys.argv[:1])) == "memplan") and signal.getsignal(
    signal.SIGINT
) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
