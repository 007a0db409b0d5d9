"""A start is as quick as its imports: programs load nothing of what other programs are made of."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest

from dmsg.cli.commands import group

#: What only clients are made of.
OF_CLIENTS = ("dmsg.clients.", "dmsg.relays.", "dmsg.mux.client.", "dmsg.messaging.client.", "dmsg.endpoints.")
#: What only relays and other roles are made of.
OF_RELAYS = (
    "dmsg.serving.service",
    "dmsg.mux.relay.",
    "dmsg.messaging.relay.",
    "dmsg.rmb.relay.",
    "dmsg.taps.settings",
)


def loaded(module: str, then: str = "") -> list[str]:
    """The modules that a fresh interpreter has after importing ``module``, and running ``then``."""
    program = f"import sys, {module}\n{then}\nprint(*sys.modules, sep='\\n')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.split()


@pytest.mark.parametrize("role", ["server", "messaging_server", "discovery", "shipper"])
def test_a_role_loads_nothing_of_clients(role: str) -> None:
    found = [name for name in loaded(f"dmsg.taps.{role}") if name.startswith(OF_CLIENTS)]
    # discovery connects to relays, to prove them
    proving = {"dmsg.mux.client.prover", "dmsg.messaging.client.prover"} if role == "discovery" else set()
    assert set(found) == proving


def test_a_command_of_a_client_loads_nothing_of_relays() -> None:
    assert [name for name in loaded("dmsg.cli.ping") if name.startswith(OF_RELAYS)] == []


def test_making_a_key_loads_no_twisted() -> None:
    assert [name for name in loaded("dmsg.cli.keys") if name.startswith("twisted")] == []


@pytest.mark.parametrize(
    "ask", ["group.main(['--help'], standalone_mode=False)", "group.shell_complete(click.Context(group), 'p')"]
)
def test_a_list_of_commands_loads_none(ask: str) -> None:
    found = loaded("dmsg.cli.commands", f"import click; from dmsg.cli.commands import group; {ask}")
    assert {name for name in found if name.startswith("dmsg.cli.")} <= {
        f"dmsg.cli.{name}" for name in ("commands", "exits", "interrupts")
    }


def test_the_list_says_of_each_command_what_it_says_of_itself() -> None:
    context = click.Context(group, terminal_width=400)
    lines = {tuple(line.split(maxsplit=1)) for line in group.get_help(context).splitlines()}
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command and (name, command.get_short_help_str(300)) in lines
