"""The ``dmsg`` command."""

from __future__ import annotations

import sys

import click

import dmsg
from dmsg.cli.config import config
from dmsg.cli.exits import Exit, epilogue
from dmsg.cli.files.receive import receive
from dmsg.cli.files.send import send
from dmsg.cli.keys import keygen, pubkey
from dmsg.cli.lookup import entry, servers
from dmsg.cli.ping import echo, ping
from dmsg.cli.relays import relays
from dmsg.cli.rmb import rmb
from dmsg.cli.tunnels import expose, forward
from dmsg.cli.up import up


@click.group(epilog=epilogue())
@click.version_option(dmsg.__version__, prog_name="dmsg")
def group() -> None:
    """Talk to programs by public key alone, through relays that cannot be avoided and need not be trusted with names.

    Settings may also come from the environment (DMSG_DISCOVERY, DMSG_KEY, DMSG_SERVER, …) and from the table [client],
    or with --protocol messaging [messaging], of a TOML file (--config or DMSG_CONFIG); "dmsg config show" tells which.
    """


for command in (keygen, pubkey, servers, entry, echo, ping, send, receive, expose, forward, relays, rmb, up, config):
    group.add_command(command)


def main() -> None:
    """Run the command line; leaves with one of the codes of :class:`dmsg.cli.exits.Exit`."""
    try:
        sys.exit(group.main(standalone_mode=False, prog_name="dmsg"))
    except click.ClickException as error:
        error.show()
        sys.exit(Exit.USAGE if isinstance(error, click.UsageError) else Exit.FAILED)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(Exit.INTERRUPTED)


if __name__ == "__main__":
    main()
