"""``dmsg keygen`` and ``dmsg pubkey``: key files."""

from __future__ import annotations

import click

from dmsg.cli.output import Output, output_options
from dmsg.crypto.errors import KeyFileError
from dmsg.crypto.keys import SecretKey, read_key_file, write_key_file


@click.command(short_help="Make a new key file and print its public half.")
@click.argument("file", type=click.Path(dir_okay=False))
@output_options
def keygen(file: str, out: Output, verbose: bool) -> None:
    """Make a new key in FILE, which must not exist, and print its public half."""
    key = SecretKey.generate()
    try:
        write_key_file(file, key)
    except KeyFileError as error:
        out.leave(error)
    out.result({"file": file, "public_key": str(key.public_key)}, str(key.public_key))


@click.command()
@click.argument("file", type=click.Path(dir_okay=False))
@output_options
def pubkey(file: str, out: Output, verbose: bool) -> None:
    """Print the public half of the key in FILE."""
    try:
        key = read_key_file(file)
    except KeyFileError as error:
        out.leave(error)
    out.result({"file": file, "public_key": str(key.public_key)}, str(key.public_key))
