"""What the processor of this machine has instructions for."""

from __future__ import annotations

import platform
from functools import lru_cache
from pathlib import Path
from typing import Final

_CPUINFO: Final = Path("/proc/cpuinfo")
#: As /proc/cpuinfo names them: AES itself, and the multiplication that GCM is made of, on x86 and on ARM.
_NEEDED: Final = ({"aes", "pclmulqdq"}, {"aes", "pmull"})
#: Where there is no such file (macOS, Windows): all that run a Python of today have both.
_MACHINES: Final = {"x86_64", "amd64", "arm64"}


@lru_cache
def has_aes(cpuinfo: Path = _CPUINFO, machine: str = "") -> bool:
    """Whether AES-256-GCM is done in hardware: two to four times as fast as ChaCha20-Poly1305, and in constant time.

    Linux says so in ``cpuinfo``; elsewhere the name of the ``machine`` decides, by default this one's.
    """
    try:
        text = cpuinfo.read_text("ascii", "replace")
    except OSError:
        return (machine or platform.machine()).lower() in _MACHINES
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip().lower() in ("flags", "features"):
            return any(needed <= set(value.split()) for needed in _NEEDED)
    return False
