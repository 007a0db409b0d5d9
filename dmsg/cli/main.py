"""How the ``dmsg`` command begins. What it needs is imported where Ctrl-C is seen to."""

import gc
import sys

from dmsg.cli.interrupts import leaving_on_interrupt


def main() -> None:
    """Run the command line; leaves with one of the codes of :class:`dmsg.cli.exits.Exit`."""
    try:
        with leaving_on_interrupt():
            gc.disable()  # until everything is imported: nothing of it ever becomes garbage, and looking takes a tenth of a start
            from dmsg.cli.commands import run_command_line
        run_command_line()
    except KeyboardInterrupt:  # outside of the command itself, which has it told
        sys.exit(130)


if __name__ == "__main__":
    main()
