"""Keeps one key's entry in one discovery as it is wanted.

:ref:`spec-publishing`. Changes are collected for a moment. An update is built on the entry in discovery, so that the half
of another program stays as it is. Sequence 0 is posted only when discovery said that it knows no entry. A failed update is
retried without end, with growing pauses. Entries are posted again while nothing changes, because they expire
(:ref:`spec-entry-expiry`). How the reference fails here: :ref:`W20 <weakness-entry-updates>`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from dmsg.crypto.keys import SecretKey
from dmsg.discovery.entry import ClientPart, Entry, ServerPart, next_sequence
from dmsg.discovery.errors import (
    DiscoveryError,
    DiscoveryUnavailable,
    EntryNotFound,
    EntryRolledBack,
    NonZeroSequence,
    WrongSequence,
    WrongTime,
)
from dmsg.discovery.wanted import WantedEntry, is_same_server
from dmsg.eventlog.reasons import Reason
from dmsg.eventlog.schema import EntryPublished
from dmsg.glue.waiters import Waiters
from dmsg.interfaces import IDiscovery, IEventLog
from dmsg.sansio.backoff import Backoff
from dmsg.sansio.jitter import RandomNumbers

#: Seconds for which changes are collected before they are published.
DEBOUNCE_S: Final = 0.2
#: How often an entry with a server half is posted again, in seconds: a fifth of the time it lives by default.
REFRESH_S: Final = 60.0
#: How often an entry without a server half is checked, in seconds, in case discovery has lost it. The check also counts as a
#: read, and a full discovery evicts entries that are read last. An entry with a server half of another program is checked as
#: often as our server halves are posted.
CHECK_S: Final = 300.0
#: How often an entry without a server half is posted again, in seconds: a sixth of the time it lives by default, so five
#: posts in a row may fail. 100,000 clients then cost a discovery 32 posts a second.
CLIENT_REFRESH_S: Final = 3600.0
#: The pause after a first failure, in seconds, doubled with each further one up to the longest.
RETRY_FIRST_S: Final = 1.0
RETRY_LONGEST_S: Final = 60.0
#: Attempts of one round to fetch and post the entry when others change it meanwhile, before the round counts as failed.
ATTEMPTS: Final = 4
#: Timeout in seconds for withdrawing the entry on closing.
WITHDRAW_TIMEOUT_S: Final = 5.0
#: Posts without success that are remembered: while discovery does not answer, those of two hours.
POSTS_REMEMBERED: Final = 128

# Discovery's hints on how to go on after an expired entry are not signed. These bounds keep a lying discovery from using up
# our sequences or timestamps.
_HINT_SEQUENCE_LIMIT: Final = 1 << 48
_DAY_NS: Final = 24 * 3600 * 1_000_000_000
_HINT_AHEAD_NS: Final = 366 * _DAY_NS


def _too_late(result: object, timeout_s: float) -> Failure:
    return Failure(DiscoveryUnavailable(f"no answer within {timeout_s:g} s"))


@dataclass(frozen=True, slots=True)
class _Base:
    """The base of the next entry: the other half, the sequence to use, and the time that it must be later than."""

    found: Entry | None
    sequence: int
    after_ns: int


@dataclass(frozen=True, slots=True)
class Pace:
    """The times of a keeper in seconds; see the constants of the same names."""

    debounce_s: float = DEBOUNCE_S
    refresh_s: float = REFRESH_S
    check_s: float = CHECK_S
    client_refresh_s: float = CLIENT_REFRESH_S
    retry_first_s: float = RETRY_FIRST_S
    retry_longest_s: float = RETRY_LONGEST_S


DEFAULT_PACE: Final = Pace()


class EntryKeeper:
    """Keeps the entry of ``secret_key``'s public key in ``discovery`` as :meth:`want` last said.

    ``clock`` drives pauses, ``now_ns()`` (Unix time in nanoseconds) gives timestamps, ``random`` spreads retries.
    ``events`` gets an :class:`~dmsg.eventlog.schema.EntryPublished` for every POST, and for every failed GET before one.
    """

    _log = Logger()

    def __init__(
        self,
        discovery: IDiscovery,
        secret_key: SecretKey,
        *,
        clock: IReactorTime,
        now_ns: Callable[[], int],
        random: RandomNumbers,
        pace: Pace,
        events: IEventLog | None,
    ) -> None:
        #: The newest entry discovery is known to have; ``None`` before the first success.
        self.entry: Entry | None = None
        #: Failures since the entry was last published, and the reason of the last one; "" if there is none.
        self.failures = 0
        self.problem = ""
        self._discovery = discovery
        self._secret_key = secret_key
        self._clock = clock
        self._now_ns = now_ns
        self._random = random
        self._pace = pace
        self._backoff = Backoff(pace.retry_first_s, pace.retry_longest_s)
        self._events: Any = events
        self._entry_wanted = WantedEntry()
        self._last_timestamp = 0
        #: When to post the entry again although nothing has changed, on `clock`. An entry of an earlier process is posted at
        #: once: that process may still run, and leaves the entry alone when it stops.
        self._renew_at_s = float("-inf")
        self._wanted = self._done = 0
        self._timer: Any = None
        self._running: Deferred[None] | None = None
        self._waiters: Waiters[None] = Waiters()
        #: The last post, also one without an answer: discovery may have it; and the last that discovery is known to have taken.
        self._posted: Entry | None = None
        self._taken: Entry | None = None
        #: The signatures of all posts after that: discovery may have any of them.
        self._signatures: deque[str] = deque(maxlen=POSTS_REMEMBERED)
        #: These two entries, while this program withdraws what it has published.
        self._withdrawn: list[Entry] = []
        #: Whether the entry was withdrawn and :meth:`want` was not called since: nothing is published until then.
        self._rests = False
        self._closed = False

    def want(self, wanted: WantedEntry) -> None:
        """Publish ``wanted`` from now on."""
        if wanted != self._entry_wanted or self._rests:
            self._entry_wanted, self._rests = wanted, False
            self._change()

    async def published(self) -> None:
        """Wait until the entry as it is wanted now (or later) is in discovery.

        Raises ``DiscoveryUnavailable`` if the keeper is closed before that.
        """
        if self._done == self._wanted:
            return
        if self._closed:
            raise DiscoveryUnavailable("the registrar is closed")
        await self._waiters.wait()

    async def close(self, *, withdraw: bool) -> None:
        """Stop. With ``withdraw``, first withdraw the entry: no relays, no connections left.

        It tries that once, for at most :data:`WITHDRAW_TIMEOUT_S`; a failure is only logged. An entry that another program
        with this key has published in place of this one's stays.
        """
        if self._closed:
            return
        self._closed = True
        self._cancel_timer()
        if self._running is not None:
            self._running.cancel()
        self._waiters.fail(DiscoveryUnavailable("the registrar was closed"))
        mine = [one for one in (self._taken, self._posted) if one is not None]
        if withdraw:
            self._entry_wanted, self._rests = self._entry_wanted.withdrawn(), True
        if withdraw and mine:
            self._withdrawn = mine
            try:
                withdrawing = Deferred.fromCoroutine(self._publish(refresh=False))
                await withdrawing.addTimeout(WITHDRAW_TIMEOUT_S, self._clock, _too_late)
            except CancelledError:
                raise
            except Exception as error:
                self._log.warn("the entry was not withdrawn: {error}", error=error)
            finally:
                self._withdrawn = []

    def reopen(self) -> None:
        """Go on after :meth:`close` with the wanted entry; nothing happens unless it was closed.

        After a withdrawal, nothing is published before the next :meth:`want`: another program may have an entry by now.
        """
        if self._closed:
            self._closed = False
            self._renew_at_s = float("-inf")
            if self._wanted and not self._rests:
                self._change()

    # --- when ----------------------------------------------------------------------------------------------------

    def _change(self) -> None:
        self._wanted += 1
        if self._closed or self._running is not None:
            return  # the running update checks again when it ends
        if self.failures and self._timer is not None:
            return  # more changes must not make the retries more frequent
        if self._timer is None or self._done == self._wanted - 1:
            self._start_in(self._pace.debounce_s)

    def _start_in(self, delay_s: float) -> None:
        self._cancel_timer()
        self._timer = self._clock.callLater(delay_s, self._start)

    def _cancel_timer(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def _start(self) -> None:
        self._timer = None
        self._running = Deferred.fromCoroutine(self._round())
        self._running.addErrback(self._note_unexpected).addBoth(self._ended)

    async def _round(self) -> None:
        aim = self._wanted
        try:
            await self._publish(refresh=self._done == aim)
        except DiscoveryError as error:
            if not self.failures:
                self._log.warn("the entry could not be published and will be again: {error}", error=error)
            self.failures += 1
            self.problem = str(error)
            return
        self.failures = 0
        self.problem = ""
        self._done = aim

    def _note_unexpected(self, failure: Any) -> None:
        if not failure.check(CancelledError):
            self.failures += 1
            self.problem = type(failure.value).__name__
            self._log.failure("the entry could not be published and will be again", failure)

    def _ended(self, _: object) -> None:
        self._running = None
        if self._closed:
            return
        if self.failures:
            self._start_in(self._backoff.pause_s(self.failures, self._random.random))
        elif self._done != self._wanted:
            self._start_in(self._pace.debounce_s)
        else:
            # An entry with a server half, even another program's, lives for minutes.
            is_short_lived = self._has_server or (self.entry is not None and self.entry.server is not None)
            period_s = self._pace.refresh_s if is_short_lived else self._pace.check_s
            self._start_in(period_s * (0.9 + self._random.random() / 10))
        if self._done == self._wanted:  # also when only one more post of it has failed
            self._waiters.fire(None)

    # --- how -----------------------------------------------------------------------------------------------------

    async def _publish(self, *, refresh: bool) -> None:
        """Bring the wanted entry to discovery, or raise a ``DiscoveryError``.

        ``refresh`` means that nothing has changed since the last time. Then server halves are posted anyway; other entries
        are checked, and posted when the last post was long ago.
        """
        # While it withdraws, another program's entry may be that of its successor.
        is_others = self._closed and self.entry != self._taken
        base = None if self.entry is None or is_others else self._after(self.entry)
        if refresh and not self._has_server:
            base, refresh = None, False
        elif not refresh and self._has_wanted and (self._closed or self._clock.seconds() < self._renew_at_s):
            return  # it was changed and changed back
        restart: _Base | None = None
        for _ in range(ATTEMPTS):
            if base is None:
                base = await self._fetch()
                if self._closed and (self._is_replaced(base.found) if base.found else self.entry is None):
                    self.entry = None  # another program may post and withdraw what it likes until this one goes on
                    return  # there is nothing to withdraw
                # An older entry is one of a restored discovery: others who have seen the newer one refuse it.
                is_newest = self.entry is None or base.after_ns >= self.entry.timestamp
                if base.found is not None and is_newest and self._is_as_wanted(base.found) and not refresh:
                    self._note_published(base.found)
                    if not self._has_server and self._clock.seconds() < self._renew_at_s:
                        return
                    if not self._closed:
                        self._done = self._wanted
                        self._waiters.fire(None)
                        if self._closed:
                            return  # one of those that waited has closed it
                    refresh = True  # the entry may be about to expire, which only a post prevents
            entry = self._next_entry(base)
            try:
                await self._post(entry)
            except WrongSequence:
                # Either another program posted, or discovery remembers more of an expired entry than it tells. In the second
                # case, our own memory is all we have.
                if base.found is None and base.sequence == 0 and self.entry is not None and restart is None:
                    base = restart = self._after(self.entry)
                else:
                    base = None
            except (NonZeroSequence, WrongTime):
                base = None
            else:
                self._note_published(entry)
                return
        raise DiscoveryUnavailable("the entry keeps changing while it is being updated")

    def _is_replaced(self, found: Entry) -> bool:
        """Whether ``found`` is of a program that has taken this one's place, and not only of one with the other half."""
        mine, has_client = self._withdrawn, isinstance(self._entry_wanted.client, ClientPart)
        if found.signature in self._signatures or (self._taken and found.timestamp <= self._taken.timestamp):
            return False
        if has_client and all(found.client != one.client for one in mine):
            return True
        if self._has_server and not any(is_same_server(found.server, one.server) for one in mine):
            return True
        # It is as this program left it. Another one posts that together with the half that is its own.
        other_client = not has_client and any(one.client is not None for one in (found, *mine))
        other_server = not self._has_server and any(one.server is not None for one in (found, *mine))
        return not (other_client or other_server)

    def _renew_in(self, delay_s: float) -> None:
        self._renew_at_s = self._clock.seconds() + delay_s * (0.75 + self._random.random() / 4)

    async def _post(self, entry: Entry) -> None:
        started_s = self._clock.seconds()
        reason = Reason.CANCELLED
        self._posted = entry
        self._signatures.append(entry.signature)
        try:
            await self._discovery.post_entry(entry)
            reason = Reason.NONE
        except DiscoveryError as error:
            reason = Reason.of(error.text)
            raise
        finally:
            self._tell(entry.sequence, started_s, reason)

    def _tell(self, sequence: int, started_s: float, reason: Reason) -> None:
        if self._events is not None:
            kind = "server" if self._has_server else "client"
            elapsed_ms = (self._clock.seconds() - started_s) * 1e3
            self._events.emit(EntryPublished(sequence, kind, elapsed_ms, not reason, reason))

    async def _fetch(self) -> _Base:
        """The entry that discovery has, or a ``DiscoveryError``: without it nothing can be posted."""
        started_s = self._clock.seconds()
        try:
            return await self._ask()
        except DiscoveryError as error:
            sequence = 0 if self.entry is None else next_sequence(self.entry.sequence)
            self._tell(sequence, started_s, Reason.of(error.text))
            raise

    async def _ask(self) -> _Base:
        """Ask discovery for the entry. Only its answer that there is none gives sequence 0."""
        try:
            return self._after(await self._discovery.get_entry(self._secret_key.public_key))
        except EntryRolledBack as error:
            # An old entry of our own (a discovery restored from a backup): continue its sequence, but not its content.
            if not isinstance(error.entry, Entry):
                raise
            stale = self._after(error.entry)
            return _Base(self.entry or stale.found, stale.sequence, stale.after_ns)
        except EntryNotFound as error:
            sequence, after_ns, now_ns = error.next_sequence or 0, error.after_timestamp or 0, self._now_ns()
            if not 0 <= sequence < _HINT_SEQUENCE_LIMIT:
                raise DiscoveryUnavailable(f"the next sequence would be {sequence}, which is not believed") from None
            if after_ns > max(now_ns + _HINT_AHEAD_NS, self._last_timestamp):
                days = (after_ns - now_ns) // _DAY_NS
                raise DiscoveryUnavailable(
                    f"the last entry of this key is said to be {days} days ahead of the clock here; more than a year is"
                    " not believed"
                ) from None
            return _Base(None, sequence, after_ns)

    @staticmethod
    def _after(entry: Entry) -> _Base:
        return _Base(entry, next_sequence(entry.sequence), entry.timestamp)

    @property
    def _has_server(self) -> bool:
        return isinstance(self._entry_wanted.server, ServerPart)

    @property
    def _has_wanted(self) -> bool:
        """Whether discovery has the wanted entry, and can have no later post of ours whose answer was lost."""
        entry, posted = self.entry, self._posted
        if entry is None or not self._is_as_wanted(entry):
            return False
        return posted is None or posted.timestamp <= entry.timestamp

    def _is_as_wanted(self, found: Entry) -> bool:
        return self._entry_wanted.is_met_by(found)

    def _next_entry(self, base: _Base) -> Entry:
        other = base.found or self.entry
        if base.found is None and other is not None:
            other = replace(other, server=None)  # expired: another program that is still a relay posts its half again
        client, server = self._entry_wanted.halves(other)
        # Later than any timestamp before, even when the clock stands still or was set back.
        timestamp = max(self._now_ns(), base.after_ns + 1, self._last_timestamp + 1)
        self._last_timestamp = timestamp
        version = self._entry_wanted.version(other)
        entry = Entry(version, base.sequence, timestamp, self._secret_key.public_key, client, server)
        return entry.sign(self._secret_key)

    def _note_published(self, entry: Entry) -> None:
        self.entry = entry
        self._last_timestamp = max(self._last_timestamp, entry.timestamp)
        if entry == self._posted != self._taken:
            self._taken = entry
            self._signatures.clear()
            self._renew_in(self._pace.client_refresh_s)
