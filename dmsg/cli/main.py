"""The start of the ``dmsg`` command. Its modules are imported where Ctrl-C is handled."""

import gc
import sys

from dmsg.cli.interrupts import leaving_on_interrupt


def main() -> None:
    """Run the command line; leaves with one of the codes of :class:`dmsg.cli.exits.Exit`."""
    try:
        with leaving_on_interrupt():
            gc.disable()  # until everything is imported: imports leave no garbage, and collections take a tenth of a start
            from dmsg.cli.commands import run_command_line
        run_command_line()
    except KeyboardInterrupt:  # outside of the command itself, which reports it
        sys.exit(130)


if __name__ == "__main__":
    main()
