"""What the receiver of a sealed stream may acknowledge once enough of it is read (:ref:`spec-sealed-acks`). Pure."""

from __future__ import annotations

from typing import NamedTuple


class AckStep(NamedTuple):
    """A frame up to which an ACK may go: its sequence, the rolling hash after it, and the bytes received up to its end."""

    sequence: int
    digest: bytes
    received_bytes: int


class AckSteps:
    """Steps of half of ``limit_bytes``, so that a slow reader of a large window is seen to move; it never holds a frame."""

    __slots__ = ("_limit_bytes", "_steps")

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._steps: list[AckStep] = []

    def withhold(self, step: AckStep, acknowledged_bytes: int) -> None:
        """``step`` may not be acknowledged yet; ``acknowledged_bytes`` have been."""
        last = self._steps[-1].received_bytes if self._steps else acknowledged_bytes
        if step.received_bytes - last >= self._limit_bytes >> 1:
            self._steps.append(step)

    def due(self, read_bytes: int) -> bool:
        """Whether a step may be acknowledged, now that the application has read ``read_bytes``."""
        return bool(self._steps) and self._steps[0].received_bytes <= read_bytes + self._limit_bytes

    def take(self, read_bytes: int) -> AckStep:
        """The last step that is :meth:`due`; it and those before it are forgotten."""
        step = self._steps.pop(0)
        while self.due(read_bytes):
            step = self._steps.pop(0)
        return step
