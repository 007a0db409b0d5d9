"""Whether the system limits this process's CPU time, as containers do. Linux's control groups; nothing elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_GROUPS: Final = Path("/proc/self/cgroup")
_ROOT: Final = Path("/sys/fs/cgroup")


def has_cpu_limit(groups: Path = _GROUPS, root: Path = _ROOT) -> bool:
    """Whether a control group of this process, or one above it, has a limit: a process that used it up stands still.

    ``groups`` lists the groups of the process, which lie below ``root``. A file that cannot be read counts as no limit.
    """
    for line in _text(groups).splitlines():
        _, controllers, name = [*line.split(":", 2), "", ""][:3]
        if not controllers:  # version 2: one hierarchy for all controllers
            base, file = root, "cpu.max"
        elif "cpu" in controllers.split(","):
            base, file = root / controllers, "cpu.cfs_quota_us"
            if not base.is_dir():
                base = root / "cpu"
        else:
            continue
        group = base / name.strip("/")
        # In a container the name may be the one outside of it; the group itself is at the base then.
        if any(_limits(each / file) for each in (group, *group.parents) if each == base or base in each.parents):
            return True
    return False


def _limits(path: Path) -> bool:
    quota = _text(path).split()
    return bool(quota) and quota[0].isdigit()


def _text(path: Path) -> str:
    try:
        return path.read_text("ascii", "replace")
    except OSError:
        return ""
