"""How many descriptors a process that serves may have open."""

from __future__ import annotations

import contextlib
from typing import Final

#: As many as Linux lets a process have where nothing else was set. Some systems name a limit that is no number one could use.
MOST_DESCRIPTORS: Final = 1_048_576


def allow_descriptors() -> None:
    """Raise this process's limit of open descriptors as far as it may raise it itself.

    Systems start programs with 1,024, for the sake of ``select``, and let them have more. With 1,024 an address that opens
    all the connections it may have, 1,000 at a relay, leaves none for others: the limits of places come too late.
    """
    try:
        import resource
    except ImportError:
        return  # a system without such limits
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):  # a system that lets it have fewer than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
