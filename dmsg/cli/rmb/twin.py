"""``dmsg rmb twin``: make a twin in a registry file, and look at one."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from contextlib import closing
from typing import Any

import click

from dmsg.cli.completion import file_option
from dmsg.cli.exits import CommandError, Exit, describe, exit_code
from dmsg.cli.output import Output, output_options, tell_failed
from dmsg.cli.runner import run
from dmsg.errors import ConfigError, DmsgError
from dmsg.rmb.core.e2e import EncryptionKey
from dmsg.rmb.core.errors import InvalidTwin
from dmsg.rmb.core.keys import KeyType
from dmsg.rmb.core.limits import MAX_TWIN
from dmsg.rmb.core.twin import Twin, format_relays
from dmsg.rmb.key_file import make_twin_key, read_twin_key
from dmsg.rmb.twins.errors import RegistryError
from dmsg.rmb.twins.open import check_registry, check_registry_file, open_registry
from dmsg.rmb.twins.table import TwinTable


@click.group(short_help="Twins in a registry file, or on tfchain.")
def twin() -> None:
    """Twins in a registry file, which the processes of a host share, or on tfchain."""


@twin.command()
@file_option("--registry", help="The registry of twins; made if it is missing.", required=True)
@file_option("--key", "key_file", help="The twin's key file; made if it is missing.", required=True)
@click.option(
    "--relay",
    "relays",
    metavar="HOST[,HOST]",
    required=True,
    multiple=True,
    help="Relays the twin can be reached over, by the names they go by (--domain of rmb-relay).",
)
@click.option(
    "--key-type",
    type=click.Choice([one.value for one in KeyType]),
    default=KeyType.ED25519.value,
    show_default=True,
    help="The kind of key that is made.",
)
@output_options
def create(registry: str, key_file: str, relays: Iterable[str], key_type: str, out: Output, verbose: bool) -> None:
    """Make a key and a twin, and print its number.

    A key that is there already is used. If it has a twin, that one's relays are changed.
    """
    hosts = [host.strip() for given in relays for host in given.split(",")]
    try:
        _check_relays(hosts)  # before anything is made
        with closing(TwinTable(registry)) as table:
            if os.path.lexists(key_file):
                key = read_twin_key(key_file)
            else:
                key = make_twin_key(key_file, KeyType(key_type), os.urandom)
            number = table.create(key, hosts, EncryptionKey(key.secret).public_key)
            found = table.get(number)
    except DmsgError as error:
        out.leave(error)
    assert found is not None
    out.result(_as_json(found), str(number))


def _check_relays(hosts: Iterable[str]) -> None:
    """Raise ``ConfigError`` for relays that no registry may hold."""
    try:
        format_relays(hosts)
    except InvalidTwin as error:
        raise ConfigError("relay", str(error), "option --relay") from None


@twin.command(short_help="Print what the registry has of a twin.")
@click.argument("number", metavar="[TWIN]", type=click.IntRange(1, MAX_TWIN), required=False)
@file_option("--registry", help="The registry of twins.")
@click.option(
    "--substrate", metavar="URL", multiple=True, help="A node of tfchain, wss://host, in place of a registry file."
)
@output_options
def show(number: int | None, registry: str | None, substrate: tuple[str, ...], out: Output, verbose: bool) -> None:
    """Print what the registry has of TWIN, or of all twins in FILE: number, account, relays, encryption key."""
    try:
        check_registry(registry, substrate)
        if registry:
            check_registry_file(registry)
            with closing(TwinTable(registry)) as table:
                if number is None:
                    _show_all(out, table)
                else:
                    _print(out, [table.get(number)], number)
        elif number is None:
            raise ConfigError("substrate", "a chain has too many twins to show all: say which")
        else:
            sys.exit(run(lambda reactor: _ask(out, reactor, substrate, number), out, verbose=verbose))
    except DmsgError as error:
        out.leave(error)


def _show_all(out: Output, table: TwinTable) -> None:
    """Print all twins; raises ``CommandError`` when some of them have not signed their rows."""
    found, altered = list[Twin | None](), list[RegistryError]()
    for number in table.numbers():
        try:
            found.append(table.get(number))
        except RegistryError as error:
            if error.reason != "altered":
                raise
            altered.append(error)
            tell_failed(out, error, describe(error))
    _print(out, found, None)
    if altered:
        text = f"{len(altered)} of {len(found) + len(altered)} rows of the registry are altered"
        raise CommandError(text, exit_code(altered[0]))


async def _ask(out: Output, reactor: Any, substrate: tuple[str, ...], number: int) -> None:
    chain = open_registry(reactor, None, substrate)
    try:
        _print(out, [await chain.get(number)], number)
    finally:
        await chain.close()


def _print(out: Output, found: list[Twin | None], number: int | None) -> None:
    twins = [one for one in found if one is not None]
    if number is not None and not twins:
        raise CommandError(f"there is no twin {number}", Exit.NOT_FOUND, {"twin": number})
    for one in twins:
        out.result(_as_json(one))
    rows = [(str(one.id), one.account.hex(), ",".join(one.relays), (one.pk or b"").hex()) for one in twins]
    out.table("Twins", ("twin", "account", "relays", "pk"), rows)


def _as_json(found: Twin) -> dict[str, Any]:
    return {
        "twin": found.id,
        "account": found.account.hex(),
        "relays": list(found.relays),
        "pk": None if found.pk is None else found.pk.hex(),
    }
