"""An event log whose events a test can look at."""

from __future__ import annotations

from typing import Any

from dmsg.eventlog.log import NullEventLog
from dmsg.eventlog.schema import Event


class MemoryEventLog(NullEventLog):
    """Keeps all events in ``events``."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def of(self, kind: type[Event]) -> list[Any]:
        """The events of one kind, oldest first."""
        return [event for event in self.events if isinstance(event, kind)]
