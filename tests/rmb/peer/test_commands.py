"""Which commands of others get a list."""

from __future__ import annotations

import pytest

from dmsg.rmb.peer.commands import (
    KEEP_COMMAND_S,
    UNSERVED_BYTES,
    UNSERVED_BYTES_BEYOND,
    UNSERVED_BYTES_OF_A_TWIN,
    UNSERVED_COMMANDS,
    UNSERVED_COMMANDS_OF_A_TWIN,
    Commands,
    list_of,
)


@pytest.mark.parametrize(
    "command", ["calc.add", "zos.system.version", "noop", "systematic", "a b", "ü", "x" * 255, "rmb", "rmbs.x"]
)
def test_a_command_has_a_list_of_its_name(command: str) -> None:
    assert list_of(command) == f"msgbus.{command}"


@pytest.mark.parametrize(
    "command",
    [
        "",
        "system.local",
        "system.reply",
        "system",
        "system.x",
        "backlog.1",
        "backlog",
        "rmb.version",
        "rmb.",
        "a\n",
        "\0",
        "\x1b[2J",
        "x" * 256,
    ],
)
def test_names_of_the_peers_own_lists_and_unprintable_ones_have_none(command: str) -> None:
    assert list_of(command) is None


def test_a_twin_makes_so_many_lists_and_others_still_can() -> None:
    commands = Commands()
    names = [f"a{number}" for number in range(UNSERVED_COMMANDS_OF_A_TWIN + 1)]
    assert [commands.admit(name, 1, 1, 0) for name in names] == [True] * UNSERVED_COMMANDS_OF_A_TWIN + [False]
    assert commands.admit(names[0], 1, 1, 0)
    assert commands.admit(names[-1], 2, 1, 0)
    assert commands.admit(names[-1], 1, 1, 0)


def test_all_twins_together_make_so_many() -> None:
    commands = Commands()
    taken = [commands.admit(f"a{number}", number, 1, 0) for number in range(UNSERVED_COMMANDS + 1)]
    assert taken.index(False) == UNSERVED_COMMANDS


def test_many_twins_with_many_lists_do_not_keep_another_from_its_few() -> None:
    commands = Commands()
    for number in range(2 * UNSERVED_COMMANDS):
        commands.admit(f"a{number}", 100 + number % 20, 1, 0)
    assert not commands.gone
    for number in range(10):
        assert commands.admit(f"real{number}", 1, 1, 0)
    assert [int(name[1:]) for name in commands.gone] == list(range(10))
    assert not commands.admit("b", 100 + 15, 1, 0)
    assert commands.admit("a0", 2, 1, 0) and len(commands.gone) == 11


def test_a_list_that_a_service_takes_from_counts_no_more() -> None:
    commands = Commands()
    for number in range(2 * UNSERVED_COMMANDS):
        assert commands.admit(f"a{number}", 1, 1, 0)
        commands.pushed(f"a{number}", commands.list_made(f"a{number}"), 1, 1, 1, 0)
        assert commands.admit(f"a{number}", 1, 1, 0)
        commands.pushed(f"a{number}", commands.list_made(f"a{number}"), 1, 1, 1, 0)  # the first one is gone
        assert commands.admit(f"a{number}", 1, 1, 0)
        commands.pushed(f"a{number}", commands.list_made(f"a{number}"), 1, 1, 7, 0)


def test_lists_that_have_expired_count_no_more() -> None:
    commands = Commands()
    for number in range(UNSERVED_COMMANDS_OF_A_TWIN):
        commands.admit(f"a{number}", 1, 1, 0)
        commands.pushed(f"a{number}", commands.list_made(f"a{number}"), 1, 1, 1, 0)
    assert not commands.admit("b", 1, 1, KEEP_COMMAND_S - 1)
    assert commands.admit("b", 1, 1, KEEP_COMMAND_S)
    commands.pushed("b", commands.list_made("b"), 1, 1, 1, KEEP_COMMAND_S)
    commands.admit("b", 1, 1, KEEP_COMMAND_S)
    commands.pushed("b", commands.list_made("b"), 1, 1, 1, KEEP_COMMAND_S)
    assert commands.admit("c", 1, 1, 3 * KEEP_COMMAND_S)


def test_commands_that_nobody_pushed_are_not_known() -> None:
    commands = Commands()
    commands.pushed("a", commands.list_made("a"), 1, 1, 0, 0)
    assert commands.admit("a", 1, 1, 0)


def push(commands: Commands, command: str, twin: int, size: int, *, length: int = 1_000_000, now: float = 0) -> bool:
    """Have a request pushed, if it is admitted; no service takes any as long as ``length`` is that large."""
    admitted = commands.admit(command, twin, size, now)
    if admitted:
        commands.pushed(command, commands.list_made(command), twin, size, length, now)
    return admitted


def fill(commands: Commands) -> None:
    """Fill what all twins have together with what a few send."""
    full = UNSERVED_BYTES // UNSERVED_BYTES_OF_A_TWIN
    assert all(push(commands, f"a{twin}", twin, UNSERVED_BYTES_OF_A_TWIN) for twin in range(full))


def test_what_one_twin_sends_for_nobody_is_bounded_in_bytes_over_all_lists() -> None:
    commands = Commands()
    assert push(commands, "a", 1, UNSERVED_BYTES_OF_A_TWIN - 10)
    assert not push(commands, "b", 1, 11)
    assert push(commands, "b", 1, 10)
    assert not push(commands, "b", 1, 1) and not push(commands, "c", 1, 1)
    assert push(commands, "a", 2, 1)


def test_twins_that_fill_all_lists_together_keep_nobody_out() -> None:
    commands = Commands()
    fill(commands)
    assert not push(commands, "b", 100, UNSERVED_BYTES_BEYOND + 1)
    for twin in range(100, 100 + UNSERVED_BYTES // UNSERVED_BYTES_BEYOND):
        assert push(commands, "b", twin, UNSERVED_BYTES_BEYOND)
        assert not push(commands, "b", twin, 1)
    assert not push(commands, "b", 99, 1), "twice as much is in the lists"


def test_what_a_service_takes_and_what_ends_counts_no_more() -> None:
    commands = Commands()
    fill(commands)
    assert not push(commands, "a0", 0, 1)
    commands.pushed("a0", commands.list_made("a0"), 0, 1, 1, 0)  # fewer than were pushed: a service takes them
    assert push(commands, "b", 0, UNSERVED_BYTES_OF_A_TWIN)
    assert not push(commands, "c", 1, 1)
    assert push(commands, "c", 1, UNSERVED_BYTES_OF_A_TWIN, now=KEEP_COMMAND_S)


def test_a_command_that_is_served_is_not_bounded_by_what_others_are_sent_for_nobody() -> None:
    commands = Commands()
    assert push(commands, "real", 1, 1) and push(commands, "real", 1, 1, length=1)
    fill(commands)
    assert push(commands, "real", 0, UNSERVED_BYTES_OF_A_TWIN)
