"""Whose post to another relay is next, while no more posts may be under way. Pure.

:ref:`spec-rmb-federation`. Twins choose the names of their relays, and may name thousands at which nothing answers. So posts
to relays that have not just shown that they answer promptly have a limit of their own.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from dmsg.rmb.core.limits import RANKED_RELAYS
from dmsg.rmb.relay.lanes import Lane

#: An answer is prompt that takes no longer, in seconds.
PROMPT_S: Final = 1.0
#: Prompt answers in a row that make a relay prompt after one that was not; else one does. With fewer, relays could be prompt from
#: time to time just to have places of prompt ones.
AGAIN: Final = 16


class Turns:
    """The posts under way: ``posts`` at most, and ``others`` to relays that are not prompt. Lanes wait here for their turns.

    The relays that were posted to last are remembered, as many as the ranker remembers.
    """

    __slots__ = ("_is_prompts_turn", "_lines", "_others", "_others_under_way", "_owed", "_posts", "under_way")

    def __init__(self, posts: int, others: int) -> None:
        self._posts = posts
        self._others = others
        #: Posts under way: all, and those to relays that were not prompt when they began.
        self.under_way = self._others_under_way = 0
        #: How many prompt answers make a relay prompt; 0 when it is.
        self._owed: OrderedDict[str, int] = OrderedDict()
        #: The lanes that wait, by whether their relay is prompt, and the kind whose turn is next if both have room.
        self._lines: dict[bool, OrderedDict[str, Lane]] = {False: OrderedDict(), True: OrderedDict()}
        self._is_prompts_turn = True

    def __bool__(self) -> bool:
        return any(self._lines.values())

    @property
    def waiting(self) -> int:
        """How many lanes wait."""
        return sum(map(len, self._lines.values()))

    def has_room(self, relay: str) -> bool:
        """Whether a post to ``relay`` may begin."""
        return self._has_room(self._is_prompt(relay))

    def begin(self, relay: str) -> bool:
        """Count a post to ``relay``; gives whether the relay is prompt, for :meth:`end`."""
        is_prompt = self._is_prompt(relay)
        self.under_way += 1
        self._others_under_way += not is_prompt
        return is_prompt

    def end(self, relay: str, was_prompt: bool, took_s: float | None) -> None:
        """A post to ``relay`` has ended with an answer after ``took_s`` seconds, or without one."""
        self.under_way -= 1
        self._others_under_way -= not was_prompt
        owed = self._owed.pop(relay, 1)
        self._owed[relay] = max(0, owed - 1) if took_s is not None and took_s <= PROMPT_S else AGAIN
        if len(self._owed) > RANKED_RELAYS:
            self._owed.popitem(last=False)

    def wait(self, relay: str, lane: Lane) -> None:
        """``lane`` waits for its turn, in the place that it has already if it waits."""
        is_prompt = self._is_prompt(relay)
        self._lines[not is_prompt].pop(relay, None)
        self._lines[is_prompt][relay] = lane

    def next(self) -> tuple[str, Lane] | None:
        """The relay whose turn it is, and its lane, which waits no more; ``None`` when there is no room or none waits."""
        for is_prompt in (self._is_prompts_turn, not self._is_prompts_turn):
            if self._lines[is_prompt] and self._has_room(is_prompt):
                self._is_prompts_turn = not is_prompt
                return self._lines[is_prompt].popitem(last=False)
        return None

    def _is_prompt(self, relay: str) -> bool:
        return self._owed.get(relay) == 0

    def _has_room(self, is_prompt: bool) -> bool:
        return self.under_way < self._posts and (is_prompt or self._others_under_way < self._others)
