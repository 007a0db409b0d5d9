"""``dmsg relays``: make an operator's signed list of relays, and look at one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Final

import click

from dmsg.cli.completion import file_option
from dmsg.cli.output import Output, output_options
from dmsg.cli.settings import ParamType, ValueType
from dmsg.crypto.errors import InvalidKey
from dmsg.crypto.keys import PublicKey, read_key_file
from dmsg.errors import DmsgError, InvalidAddress
from dmsg.ops.values import KEYS
from dmsg.relays.operator_list import DOCUMENT_LIMIT_BYTES, ListedRelay, RelayList, sign_relay_list

#: How many days a list is valid by default: an operator that signs weekly may miss three weeks.
DEFAULT_DAYS: Final = 30
_DAY_S: Final = 24 * 3600


class ListedRelayType(ParamType):
    """A relay on the command line: ``pk`` or ``pk@host:port``."""

    name = "PK[@HOST:PORT]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> ListedRelay:
        """The relay, or a usage error."""
        try:
            return value if isinstance(value, ListedRelay) else ListedRelay.parse(value)
        except (InvalidKey, InvalidAddress) as error:
            self.fail(str(error), param, ctx)


@click.group(short_help="Lists of relays that an operator signs.")
def relays() -> None:
    """Lists of relays that an operator signs, and that commands take as --relays."""


@relays.command()
@click.argument("listed", metavar="PK[@HOST:PORT]...", nargs=-1, required=True, type=ListedRelayType())
@file_option("--key", "key_file", help="The operator's key file.", required=True)
@click.option(
    "--days", type=click.IntRange(1, 366), default=DEFAULT_DAYS, show_default=True, help="How long it is believed."
)
@output_options
def sign(listed: tuple[ListedRelay, ...], key_file: str, days: int, out: Output, verbose: bool) -> None:
    """Print a signed list of the given relays.

    One that is given without an address has none in the list: commands that use the list look it up in discovery.
    """
    now = int(time.time())
    try:
        data = sign_relay_list(listed, read_key_file(key_file), issued=now, expires=now + days * _DAY_S)
    except DmsgError as error:
        out.leave(error)
    out.raw(data + b"\n")


@relays.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--relays-key", "keys", type=ValueType(KEYS), required=True, help="Who may have signed it.")
@output_options
def show(file: Path, keys: tuple[PublicKey, ...], out: Output, verbose: bool) -> None:
    """Verify the list in FILE and print what it says."""
    try:
        with file.open("rb") as opened:
            found = RelayList.parse(opened.read(DOCUMENT_LIMIT_BYTES + 1), keys, time.time())
    except (DmsgError, OSError) as error:
        out.leave(error)
    out.result(
        {
            "issuer": str(found.issuer),
            "issued": found.issued,
            "expires": found.expires,
            "relays": [
                {"public_key": str(one.public_key), "address": None if one.address is None else str(one.address)}
                for one in found.relays
            ],
        },
        *map(str, found.relays),
    )
