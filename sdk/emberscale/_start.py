"""The start of the `emberscale` command: Ctrl-C ends it with one line from its first moment.

Importing the command takes a second or more, in which a KeyboardInterrupt would print a traceback.
"""

import os
import signal
import sys
from types import FrameType

_EXIT_CODE = 128 + signal.SIGINT
_LINE = "interrupted: nothing was started\n"


def _end_at_once(number: int, frame: FrameType | None) -> None:
    """Ends the process at once: there is nothing to clean up, and imports may catch exceptions."""
    os.write(sys.stderr.fileno(), _LINE.encode())
    os._exit(_EXIT_CODE)


def _end(number: int, frame: FrameType | None) -> None:
    sys.stderr.write("interrupted\n")
    raise SystemExit(_EXIT_CODE)


def main() -> None:
    """The entry point of the console script."""
    signal.signal(signal.SIGINT, _end_at_once)
    from emberscale_api.start import share_kernels, without_collection

    share_kernels(os.environ)
    with without_collection():
        from emberscale import _cli

        _cli.import_command(sys.argv[1:])
    signal.signal(signal.SIGINT, _end)
    _cli.main()
