"""``dmsg rmb relay-key``: the key by which other relays know a relay."""

from __future__ import annotations

import os

import click

from dmsg.cli.completion import file_option
from dmsg.cli.exits import CommandError, Exit
from dmsg.cli.output import Output, output_options
from dmsg.errors import DmsgError
from dmsg.rmb.core.keys import KeyType
from dmsg.rmb.key_file import make_twin_key, read_twin_key


@click.command("relay-key", short_help="Print the public key of a relay.")
@file_option("--key", "key_file", help="The relay's key file; made if it is missing.", required=True)
@output_options
def relay_key(key_file: str, out: Output, verbose: bool) -> None:
    """Print the public key of a relay, which others give as --trust NAME=KEY to rmb-relay."""
    try:
        if os.path.lexists(key_file):
            key = read_twin_key(key_file)
        else:
            key = make_twin_key(key_file, KeyType.ED25519, os.urandom)
    except DmsgError as error:
        out.leave(error)
    if key.kind is not KeyType.ED25519:
        out.leave(CommandError("the key of a relay is of ed25519", Exit.USAGE))
    out.result({"key": key.account.hex()}, key.account.hex())
