"""The reactor that a program of ours begins with. Programs that use dmsg choose their own.

Importing this module installs none.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from twisted.application.reactors import NoSuchReactor, installReactor

from dmsg.errors import ConfigError

#: Names the reactor of ``dmsg``, and of roles that are started without ``--reactor``, as ``twistd --help-reactors`` does.
REACTOR_VARIABLE: Final = "DMSG_REACTOR"


def install_default(environ: Mapping[str, str]) -> None:
    """Install the reactor of a program of ours, unless the process has one.

    It is the one that ``DMSG_REACTOR`` in ``environ`` names. Without that it is :mod:`dmsg.glue.lean_epoll` where there is
    epoll, and elsewhere none: Twisted takes its default when it is first asked. Raises ``ConfigError`` if the one that is
    named cannot be had.
    """
    if "twisted.internet.reactor" in sys.modules:
        return
    name = environ.get(REACTOR_VARIABLE)
    if name:
        try:
            installReactor(name)
        except NoSuchReactor:
            raise ConfigError("reactor", f"{name!r} is none; twistd --help-reactors lists them") from None
        except Exception as error:  # a reactor's own: what it needs is not there
            raise ConfigError("reactor", f"{name!r} cannot be used: {error}") from None
        return
    with suppress(ImportError):
        from dmsg.glue.lean_epoll import install

        install()
