"""The promises of a run, whatever happened in it."""

from __future__ import annotations

import base64
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from dmsg.rmb.client.errors import (
    CallRefused,
    CallTimeout,
    EnvelopeTooLarge,
    NotConnected,
    RegistryFailed,
    Stopped,
    TooMuchUnderWay,
    TwinUnknown,
)
from dmsg.rmb.client.service import Answer
from dmsg.rmb.core.address import SessionAddress
from dmsg.rmb.core.twin import Twin
from dmsg.testing.memory import MemoryNetwork

from .peers import Ask, Peer
from .profiles import Profile
from .relays import Relay
from .sessions import Call, Client, Raw, Sent

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Seconds after which all programs of a run without faults are connected.
_STARTED_S = 5.0


class Checks:
    """The promises checked in :class:`~tests.simulation_rmb.world.World`."""

    network: MemoryNetwork
    profile: Profile
    twins: dict[int, Twin]
    relays: list[Relay]
    clients: list[Client]
    peers: list[Peer]
    raws: list[Raw]
    calls: list[Call]
    asks: list[Ask]
    sent: dict[str, Sent]
    lossy_at: Mapping[SessionAddress | None, list[float]]

    def fail(self, text: str) -> None:
        """Record a broken promise."""
        raise NotImplementedError

    def handled(self, what: Call | Ask, who: Any, incarnation: int, source: SessionAddress) -> None:
        """A handler, or a service behind a peer, has been given ``what``."""
        now = self.network.seconds()
        what.handled.append((now, who, incarnation))
        if isinstance(what, Call):
            is_for_it, asker, ends_at = who.address == what.target, what.caller, what.began_at + what.timeout_s
        else:
            is_for_it, asker, ends_at = who.address.twin in what.twins, what.peer, what.ends_at
            is_for_it &= who.address.connection is None
        if not is_for_it:
            self.fail(f"{who} was given {what}")
        if source != asker.address:
            self.fail(f"{who} was told that {source} has made {what}")
        times = sum(one is who for _, one, _ in what.handled)
        times_here = sum(one is who and which == incarnation for _, one, which in what.handled)
        is_asked_anew = isinstance(what, Ask) and what.peer.incarnation > 1  # by the next process
        # Requests that a peer has pushed to its Redis are served even if its next process already runs.
        too_often = times > incarnation if isinstance(who, Peer) else times_here > 1
        if too_often and not is_asked_anew:
            self.fail(f"handled twice: {what}")
        if now > ends_at + 1 + 10 + self.profile.skew_s * 2 and not isinstance(who, Peer):
            self.fail(f"handled too late: {what}")

    def _check_calls(self) -> None:
        for call in self.calls:
            if call.was_killed:
                continue
            if call.ended_at is None:
                self.fail(f"no end: {call}")
                continue
            if call.ended_at > call.began_at + call.timeout_s + 0.001:
                self.fail(f"late: {call}")
            outcome = call.outcome
            profile = self.profile
            if call.how == "quick" and not call.cancelled and call.timeout_s > 3 and profile.is_quiet:
                is_there = any(one.address == call.target for one in [*self.clients, *self.peers])
                is_there &= call.began_at > _STARTED_S or not call.fail_fast
                if not isinstance(outcome, Answer) and is_there and call.size < 1 << 20:
                    self.fail(f"without any fault: {call}")
            if isinstance(outcome, (CallTimeout, NotConnected)) and self._must_end(call):
                self.fail(f"it has had time: {call}")
            if isinstance(outcome, Answer):
                self._check_answer(call, outcome)
            elif isinstance(outcome, CallRefused):
                self._check_refusal(call, outcome)
            elif isinstance(outcome, (CallTimeout, NotConnected)):
                if call.ended_at < call.began_at + call.timeout_s - 0.001:
                    self.fail(f"early: {call}")
            elif isinstance(outcome, TooMuchUnderWay) and self.profile.busy:
                pass
            elif isinstance(outcome, TwinUnknown):
                if call.target.twin in self.twins:
                    self.fail(f"it is known: {call}")
            elif isinstance(outcome, EnvelopeTooLarge):
                if call.size < 1 << 20:
                    self.fail(f"it is not large: {call}")
            elif isinstance(outcome, (RegistryFailed, Stopped)) or call.cancelled:
                pass
            else:
                self.fail(f"unexpected: {call}")

    def _must_end(self, call: Call) -> bool:
        """Whether a call gets an answer or an error before it expires, whatever has happened meanwhile."""
        profile = self.profile
        if call.how == "never" or call.once or call.target not in [one.address for one in [*self.clients, *self.peers]]:
            return False
        if (
            profile.has("kill relay", "kill client", "stop client", "rival", "peer", "redis")
            or profile.full
            or profile.tight
            or profile.busy
            or profile.limited
        ):
            return False
        if profile.crowded or (profile.has("stop relay") and not all(relay.durable for relay in self.relays)):
            return False
        if profile.has("cut", "freeze", "part", "registry", "store"):  # written data counts as delivered
            return False
        if profile.has("stop relay", "clock"):
            return call.timeout_s > 150
        return call.timeout_s > 15

    def _check_answer(self, call: Call, answer: Answer) -> None:
        if not answer.data.startswith(b"%d|" % call.number) or answer.source != call.target or not call.handled:
            self.fail(f"not its answer: {call}")
        if (len(answer.data) > 100) != (call.how == "large") or call.how in ("refuse", "never"):
            self.fail(f"not that answer: {call}")

    def _allowed(self, to: SessionAddress, fail_fast: bool) -> set[int]:
        """Errors that relays may give."""
        profile = self.profile
        allowed = {126}
        if profile.has("registry"):
            allowed.add(131)
        if (
            profile.has("store", "leave", "hold", "cut", "freeze", "kill relay", "stop relay")
            or profile.full
            or profile.tight
        ):
            allowed |= {130, 133}
        if fail_fast:
            allowed |= {125, 127}
        if profile.limited:
            allowed.add(120)
        if profile.has("stop client"):  # programs move to other relays
            allowed |= {127, 125}
        if profile.has("kill relay", "stop relay", "part", "freeze", "cut", "clock"):
            allowed |= {127, 133}
        if to.twin not in self.twins:
            allowed |= {123}
        return allowed

    def _check_refusal(self, call: Call, error: CallRefused) -> None:
        by_relay = error.source.twin == 0
        if not by_relay and error.source != call.target:
            self.fail(f"refused by another: {call}")
        if by_relay:
            if error.code not in self._allowed(call.target, call.fail_fast):
                self.fail(f"refused with an error that cannot be: {call}")
        elif error.code == 77:
            if call.how != "refuse":
                self.fail(f"refused without a reason: {call}")
        elif error.code not in (109, 255, 500, 102):
            self.fail(f"refused with an error that cannot be: {call}")

    def _check_asks(self) -> None:
        """Each request is answered in its list once for each destination, before it expires."""
        delay_s = self.network.delay_s
        taken_at: dict[Peer, float] = {}
        for ask in self.asks:
            # A peer takes one request after the other, each in one round trip to its Redis; before the first it makes eight.
            taken_at[ask.peer] = max(taken_at.get(ask.peer, 16 * delay_s), ask.began_at) + 2 * delay_s
            expected = sorted(map(str, ask.twins))
            answers, seen = [], {}
            for at, one in ask.answers:
                source = one["src"].partition(":")[0]
                before = seen.setdefault(source, at)
                # The peer may have pushed an error of its own right before it was killed; the request is then taken anew.
                if not (one["err"] and any(before <= killed_at < at for killed_at in ask.peer.killed_at)):
                    answers.append(source)
            if sorted(answers) != expected:
                self.fail(f"not answered once: {ask}")
            for at, one in ask.answers:
                error = one["err"]
                if error is None and not base64.b64decode(one["dat"]).startswith(b"a%d|" % ask.number):
                    self.fail(f"not its answer: {ask}")
                if error is None and ask.how in ("never", "refuse"):
                    self.fail(f"not that answer: {ask}")
                if error is not None and error["code"] == 77 and ask.how != "refuse":
                    self.fail(f"refused without a reason: {ask}")
                late_s = 0.01 + 8 * delay_s
                may_be_late = self.profile.has("peer", "redis", "part", "freeze", "cut", "clock")
                if at > max(ask.ends_at, taken_at[ask.peer]) + late_s and not may_be_late:
                    self.fail(f"answered too late: {ask}")

    def _check_envelopes(self) -> None:
        for sent in self.sent.values():
            if len(sent.arrived) > 1 and not self.profile.may_double:
                self.fail(f"twice: {sent}")
            # An envelope that expires while it is posted to another relay may still arrive there.
            errors = [code for _, code, _ in sent.errors if code != 126]
            if sent.arrived and errors and not self.profile.may_double:
                self.fail(f"arrived and refused: {sent}")
            for at, _ in sent.arrived:
                # A slow session may read an envelope that was written in time long after its expiry.
                # So may one that a slow store was asked for in time.
                if at > sent.ends_at + 1 + 2 * self.profile.skew_s and not self.profile.may_be_late:
                    self.fail(f"after its time: {sent}")
            for _, code, _ in sent.errors:
                if not sent.is_request:
                    self.fail(f"an error for what is no request: {sent}")
                if code not in self._allowed(sent.to, sent.fail_fast):
                    self.fail(f"an error that cannot be: {sent}")
            if not sent.arrived and not sent.errors:
                self._check_lost(sent)
        if self.profile.keeps_order:
            self._check_order()

    def _check_lost(self, sent: Sent) -> None:
        if not sent.is_request and (sent.fail_fast or self.profile.refuses):
            return  # its sender hears nothing
        if self.profile.full:
            return  # it may have made room for another sender's
        lossy = [at for address in (None, sent.to, sent.sender.address) for at in self.lossy_at.get(address, ())]
        receiver = next(raw for raw in self.raws if raw.address == sent.to)
        enough_s = 60.0 if self.profile.faults else 20.0  # relays that do not know each other post single envelopes
        if receiver.longest_s(sent.sent_at, int(sent.ends_at)) < enough_s:
            return  # it has expired before
        if max(lossy, default=-1.0) < sent.sent_at - 0.5:
            self.fail(f"lost: {sent}")

    def _check_order(self) -> None:
        rows: dict[Any, list[Sent]] = defaultdict(list)
        for sent in self.sent.values():
            receiver = next(raw for raw in self.raws if raw.address == sent.to)
            if sent.arrived and receiver.relay.name == sent.relay:
                connection = sent.arrived[0][1]
                # Envelopes that an ended session did not get come after those that waited in the store.
                if sent.sent_at > receiver.connections[connection]:
                    rows[sent.sender, sent.connection, sent.to, connection].append(sent)
        for row in rows.values():
            newest = -1.0
            for sent in row:
                if sent.arrived[0][0] < newest:
                    self.fail(f"out of order: {sent}")
                newest = max(newest, sent.arrived[0][0])
