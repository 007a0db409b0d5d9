"""Ctrl-C while a command is being imported. Imports next to nothing itself."""

import os
import signal

#: As :attr:`dmsg.cli.exits.Exit.INTERRUPTED`, which takes imports of its own.
_INTERRUPTED = 130


class leaving_on_interrupt:
    """Inside of the block SIGINT ends the process at once and in silence, because nothing has begun.

    A ``KeyboardInterrupt`` would come out of whatever module is being imported, as a traceback. A SIGINT that is ignored stays
    so, and so does a handler of a program of which this is a part; in another thread than the first, nothing is changed.
    """

    _is_set = False

    def __enter__(self) -> None:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            try:
                signal.signal(signal.SIGINT, lambda number, frame: os._exit(_INTERRUPTED))
            except ValueError:  # only the first thread may set handlers
                return
            self._is_set = True

    def __exit__(self, *_: object) -> None:
        if self._is_set:
            signal.signal(signal.SIGINT, signal.default_int_handler)
