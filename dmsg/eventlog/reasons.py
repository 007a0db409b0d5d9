"""The reasons that events carry: a closed list of short fixed texts, which the log pipeline matches. Pure.

Errors carry their reasons as texts, because some come from other programs and libraries. The maker of an event turns the
text into a member with :meth:`Reason.of`; a text that is not listed becomes :attr:`Reason.OTHER`. The encoder does the same,
so that no other reason is ever written. ``spark/dmsg_logs/schemas.py`` has a copy of the list.

Rule for changes: a text is never changed and never removed, because readers of old logs match it.
"""

from __future__ import annotations

from enum import Enum


class Reason(str, Enum):
    """Why something ended, failed or was refused. Each is its text: ``Reason.BUSY == "busy"``."""

    #: There is no reason to give: it went well.
    NONE = ""
    #: A reason that is not in this list, or several reasons.
    OTHER = "other"

    # --- how programs end
    STOPPED = "stopped"
    UPLOADS_ABANDONED = "uploads were abandoned"

    # --- CLOSE codes, by their names
    NORMAL = "normal"
    REFUSED = "refused"
    UNKNOWN_PEER = "unknown_peer"
    BUSY = "busy"
    RATE_LIMITED = "rate_limited"
    SLOW_CONSUMER = "slow_consumer"
    ABUSE = "abuse"
    BAD_ID = "bad_id"
    MALFORMED = "malformed"
    DOWNGRADE = "downgrade"
    UNSUPPORTED = "unsupported"
    HANDSHAKE_TIMEOUT = "handshake_timeout"
    INTEGRITY = "integrity"
    PEER_GONE = "peer_gone"
    SERVER_DRAINING = "server_draining"
    DEADLINE = "deadline"
    ACCESS_DENIED = "access_denied"
    NO_SUCH_SERVICE = "no_such_service"
    UNKNOWN = "unknown"

    # --- what a relay has no room for
    TOO_MANY_CONNECTIONS = "too many connections"
    CONNECTIONS_PER_ADDRESS = "connections_per_address"
    CONNECTS_PER_ADDRESS = "connects_per_address"
    CONNECTS_PER_NETWORK = "connects_per_network"
    HALF_OPEN = "half_open"
    HALF_OPEN_PER_ADDRESS = "half_open_per_address"
    HANDSHAKES = "handshakes"
    HANDSHAKES_PER_ADDRESS = "handshakes_per_address"
    HANDSHAKES_PER_NETWORK = "handshakes_per_network"
    REQUESTS_PER_TARGET = "requests_per_target"
    EVICTED = "evicted"
    REPLACED = "replaced"

    # --- what the other side did wrong on a connection
    RECORD_TOO_SHORT = "too short"
    RECORD_OUT_OF_SEQUENCE = "out of sequence"
    RECORD_DOES_NOT_OPEN = "does not open"
    MESSAGE_1_DOES_NOT_OPEN = "message 1 does not open"
    MESSAGE_2_DOES_NOT_OPEN = "message 2 does not open"
    MESSAGE_3_DOES_NOT_OPEN = "message 3 does not open"
    MESSAGE_OUT_OF_TURN = "message out of turn"
    MESSAGE_OVER_LIMIT = "message over the limit"
    NO_COOKIE = "no cookie"
    SILENT = "silent"
    TIMEOUT = "timeout"
    NO_OK_IN_TIME = "no OK in time"
    FRAME_BEFORE_OK = "frame before OK"
    SECOND_OK = "second OK"
    UNKNOWN_TYPE = "unknown type"
    PAYLOAD_OVER_LIMIT = "payload over the limit"
    REQUEST_FOR_ID_IN_USE = "REQUEST for an id in use"
    MALFORMED_RESUME = "malformed resume"
    TLVS_OVER_LIMIT = "TLV list over the limit"
    TLVS_CUT = "TLV list is cut"
    TLV_TWICE = "TLV given twice"

    # --- what the other side did wrong on a link of the messaging system
    NO_JSON = "not JSON"
    NO_LINE_FEED = "no line feed"
    UNKNOWN_VERSION = "unknown version"
    MALFORMED_INITIATOR = "malformed initiator"
    MALFORMED_RESPONDER = "malformed responder"
    MALFORMED_NONCE = "malformed nonce"
    MALFORMED_SIG1 = "malformed sig1"
    MALFORMED_SIG2 = "malformed sig2"
    MALFORMED_ACCEPTED = "malformed accepted"
    NOT_AN_ECHO = "not an echo"
    NOT_OUR_KEY = "not our key"
    SIGNED_TOO_EARLY = "signed too early"
    SIG1_DOES_NOT_VERIFY = "sig1 does not verify"
    SIG2_DOES_NOT_VERIFY = "sig2 does not verify"
    NO_CHANNEL_ID = "no channel id"
    FIRST_FRAME_NOT_RECOGNISED = "first frame not recognised"

    # --- how connections end
    CLOSED = "closed"
    CLOSED_BY_PEER = "closed by peer"
    CLOSED_BY_SERVER = "closed by server"
    CONNECTION_LOST = "connection lost"
    GIVEN_UP = "given up"
    REFUSED_BY_SERVER = "refused by server"
    SERVER_UNDER_LOAD = "server under load"
    NONCE_EXHAUSTED = "NonceExhausted"
    LOCAL_PROTOCOL_ERROR = "LocalProtocolError"

    # --- the steps of a dial
    UNAVAILABLE = "unavailable"
    NO_ENTRY = "no entry"
    NO_COMMON_SERVER = "no common server"
    SERVER_HAS_NO_ENTRY = "server has no entry"
    ENTRY_IS_NO_SERVER = "entry is not a server's"
    ENTRY_HAS_NO_ADDRESS = "entry has no usable address"
    NO_DISCOVERY = "server is not pinned and there is no discovery"
    NOT_ON_LIST = "not on the relay list"
    ANOTHER_PROTOCOL = "speaks another protocol"
    NETWORK_IN_USE = "network in use already"
    CONNECTION_REFUSED = "connection refused"
    HOST_NOT_FOUND = "host not found"
    UNREACHABLE = "unreachable"
    NO_DESCRIPTOR = "no file descriptor is free"
    SERVER_CONNECTION_LOST = "server connection lost"
    REQUEST_REJECTED = "request rejected"
    ACCEPT_CHECK_FAILED = "accept check failed"
    NO_PROTOCOL = "the factory built no protocol"
    NO_ATTEMPT = "no attempt was made"

    # --- why a session came up, or a transport went on over another path
    FIRST = "first"
    RECONNECT = "reconnect"
    MOVED = "moved"
    SERVER_LOST = "ServerLost"

    # --- what discovery answers, by its texts
    UNEXPECTED = "something unexpected happened"
    ENTRY_NOT_FOUND = "entry of public key is not found"
    BAD_INPUT = "error bad input"
    INVALID_SIGNATURE = "invalid signature"
    TOO_MANY_REQUESTS = "too many requests"
    LISTING_FORBIDDEN = "access is forbidden"
    ENTRY_ROLLED_BACK = "entry is older than one seen before"
    ADDRESS_NOT_GLOBAL = "server address is not global"
    ENTRY_NO_VERSION = "entry validation error: entry has no version"
    ENTRY_NO_SIGNATURE = "entry validation error: entry has no signature"
    ENTRY_NO_HALF = "entry validation error: entry has neither client or server field"
    ENTRY_NIL_KEYS = "entry validation error: entry Keys is nil"
    ENTRY_NON_ZERO_SEQUENCE = "entry validation error: new entry has non-zero sequence"
    ENTRY_WRONG_SEQUENCE = "entry validation error: sequence field of new entry is not sequence of old entry + 1"
    ENTRY_WRONG_TIME = "entry validation error: previous entry timestamp is not set before current entry timestamp"
    CLIENT_GONE = "client gone"
    CANCELLED = "cancelled"

    # --- signed documents that are not used
    UNREADABLE = "unreadable"
    TOO_LONG = "too_long"
    NOT_JSON = "not_json"
    WRONG_FORMAT = "wrong_format"
    WRONG_VERSION = "wrong_version"
    BAD_FIELD = "bad_field"
    TOO_MANY_RELAYS = "too_many_relays"
    UNTRUSTED = "untrusted"
    BAD_SIGNATURE = "bad_signature"
    FROM_THE_FUTURE = "from_the_future"
    EXPIRED = "expired"
    ROLLED_BACK = "rolled_back"

    # --- files that are not shipped ("unreadable" and "unreachable" as above)
    FAILED = "failed"
    DAMAGED = "damaged"
    CONFLICT = "conflict"
    MISMATCH = "mismatch"
    NO_SUCH_PLACE = "no_such_place"
    NO_SPACE = "no_space"
    DENIED = "denied"

    # --- logins and sessions of the Reliable Message Bus ("replaced", "evicted", "silent", "too many connections" as above)
    NO_TOKEN = "no token"
    TOKEN_MALFORMED = "token malformed"
    TOKEN_EXPIRED = "token expired"
    TOKEN_LIVES_TOO_LONG = "token lives too long"
    TOKEN_FROM_THE_FUTURE = "token from the future"
    TOKEN_FOR_ANOTHER_RELAY = "token for another relay"
    TOKEN_DOES_NOT_VERIFY = "token does not verify"
    UNKNOWN_TWIN = "unknown twin"
    REGISTRY_FAILED = "registry failed"
    UPGRADE_REFUSED = "upgrade refused"

    # --- what the other side did wrong on a WebSocket
    NO_ANSWER = "no answer"
    ANSWER_NOT_HTTP = "the answer is not HTTP/1.1"
    ANSWER_HEAD_OVER_LIMIT = "the answer's head is too long"
    KEEPALIVE = "keepalive"
    MASKED = "masked"
    NOT_MASKED = "not masked"
    LENGTH_TOO_WIDE = "length in too many bytes"
    MESSAGE_TOO_LONG = "message too long"
    MESSAGE_TOO_SLOW = "message too slow"
    RESERVED_BIT = "reserved bit"
    UNKNOWN_OPCODE = "unknown opcode"
    FRAGMENTED_CONTROL_FRAME = "fragmented control frame"
    LONG_CONTROL_FRAME = "long control frame"
    CONTINUATION_OF_NOTHING = "continuation of nothing"
    MESSAGE_WITHIN_MESSAGE = "message within a message"
    TEXT_MESSAGE = "text message"
    FRAMES_WITHOUT_DATA = "too many frames without data"
    CLOSE_CODE = "close code"
    NOT_UTF_8 = "not UTF-8"

    # --- envelopes that go nowhere: what the relay tells the sender, by its texts, and what it cannot tell
    LIMITS_EXCEEDED = "exceeded rate limits, dropping message"
    WRONG_SOURCE = "message wrong source"
    NO_DESTINATION = "message with missing destination"
    UNKNOWN_DESTINATION = "unknown twin destination"
    NO_RELAY_OF_TWIN = "relay info is not set for this twin"
    DESTINATION_OFFLINE = "destination offline"
    MESSAGE_EXPIRED = "message has expired"
    REJECTED_OFFLINE = "remote relay rejected permanently: destination offline"
    REJECTED_UNKNOWN = "remote relay rejected permanently: self twin not found!"
    REJECTED_NO_RELAY = "remote relay rejected permanently: relay is not set for this twin"
    ENVELOPE_MALFORMED = "envelope malformed"
    NOT_ROUTED = "failed to route message to peer"
    NO_TWIN_INFORMATION = "failed to get twin information"
    TOO_LARGE = "message is too large"
    OVERLOADED = "relay is overloaded, try again later"

    # --- attempts of federation, and what other relays are refused for ("timeout", "connection refused" … as above)
    TLS_FAILED = "TLS failed"
    ANSWERED_4XX = "answered 4xx"
    ANSWERED_5XX = "answered 5xx"
    ANSWERED_OTHERWISE = "answered otherwise"
    NOT_SIGNED = "not signed"
    UNKNOWN_RELAY = "unknown relay"
    TIME_IS_OFF = "time is off"
    NOT_OUR_TWIN = "not our twin"

    # --- calls ("timeout", "unknown twin" as above) and envelopes a twin does not take
    NOT_CONNECTED = "not connected"
    ANSWERED_WITH_ERROR = "answered with an error"
    UNKNOWN_COMMAND = "unknown command"
    NO_MESSAGE = "no message"
    WRONG_DESTINATION = "wrong destination"
    UNSIGNED_SOURCE = "unsigned source"
    ENVELOPE_SIGNATURE = "bad signature"
    REPLAYED = "replayed"
    PLAIN = "plain"
    NO_SENDER_KEY = "no sender key"
    NO_PUBLIC_KEY = "no public key"
    ENCRYPTION = "encryption"

    # A member is shown as its text everywhere: Python's versions disagree about the default for an Enum with str.
    __str__ = str.__str__

    def __format__(self, format_spec: str) -> str:
        return str.__format__(self, format_spec)

    @classmethod
    def of(cls, text: str) -> Reason:
        """The reason ``text``; :attr:`OTHER` for one that is not listed."""
        return _REASONS.get(text, _OTHER)


_REASONS: dict[str, Reason] = {reason.value: reason for reason in Reason}
_OTHER = Reason.OTHER
