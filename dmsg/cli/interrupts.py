"""Ctrl-C while a command is being imported. Imports next to nothing itself."""

import os
import signal

#: As :attr:`dmsg.cli.exits.Exit.INTERRUPTED`, which takes imports of its own.
_INTERRUPTED = 130


class leaving_on_interrupt:
    """Inside of the block SIGINT ends the process at once and silently, because nothing has begun.

    A ``KeyboardInterrupt`` would come out of whatever module is being imported, as a traceback. An ignored SIGINT stays
    ignored, and the handler of a program that this is a part of stays in place. Outside the main thread nothing is changed.
    """

    _is_set = False

    def __enter__(self) -> None:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            try:
                signal.signal(signal.SIGINT, lambda number, frame: os._exit(_INTERRUPTED))
            except ValueError:  # only the main thread may set handlers
                return
            self._is_set = True

    def __exit__(self, *_: object) -> None:
        if self._is_set:
            signal.signal(signal.SIGINT, signal.default_int_handler)
