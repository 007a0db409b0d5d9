"""The reactor that our own programs start with. Programs that use dmsg choose their own.

Importing this module installs none.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from twisted.application.reactors import NoSuchReactor, installReactor

from dmsg.errors import ConfigError

#: Names the reactor of ``dmsg``, and of roles started without ``--reactor``: a name that ``twistd --help-reactors`` lists.
REACTOR_VARIABLE: Final = "DMSG_REACTOR"


def install_default(environ: Mapping[str, str]) -> None:
    """Install the reactor of a program of ours, unless the process has one.

    ``DMSG_REACTOR`` in ``environ`` names it. Without that variable it is :mod:`dmsg.glue.lean_epoll` where there is epoll;
    elsewhere none is installed, and Twisted takes its default when it is first asked. Raises ``ConfigError`` if the named
    reactor cannot be installed.
    """
    if "twisted.internet.reactor" in sys.modules:
        return
    name = environ.get(REACTOR_VARIABLE)
    if name:
        try:
            installReactor(name)
        except NoSuchReactor:
            raise ConfigError("reactor", f"{name!r} is none; twistd --help-reactors lists them") from None
        except Exception as error:  # raised by the reactor: something that it needs is missing
            raise ConfigError("reactor", f"{name!r} cannot be used: {error}") from None
        return
    with suppress(ImportError):
        from dmsg.glue.lean_epoll import install

        install()
