"""What a shell offers when the value of an option is completed, and options that have it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

F = TypeVar("F", bound=Callable[..., Any])

#: What click asks for the values that begin with a text.
Complete = Callable[[Any, Any, str], list[CompletionItem]]


def files(context: Any, parameter: Any, begun: str) -> list[CompletionItem]:
    """Names of files, which the shell knows best."""
    return [CompletionItem(begun, type="file")]


def directories(context: Any, parameter: Any, begun: str) -> list[CompletionItem]:
    """Names of directories."""
    return [CompletionItem(begun, type="dir")]


def file_option(*names: str, help: str, required: bool = False) -> Callable[[F], F]:
    """An option that takes the name of a file."""
    return click.option(*names, metavar="FILE", shell_complete=files, required=required, help=help)


def values_of(metavar: str) -> Complete | None:
    """Values for an option whose help shows ``metavar``: files, directories or a few words; ``None`` for all others."""
    words = metavar.split("|")
    if "FILE" in words:
        return files
    if "DIR" in words:
        return directories
    if len(words) < 2 or not all(word.islower() for word in words):
        return None
    return lambda context, parameter, begun: [CompletionItem(word) for word in words if word.startswith(begun)]
