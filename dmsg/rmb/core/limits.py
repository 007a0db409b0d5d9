"""The limits of envelopes, tokens and JSON messages, each with its unit and its reason. Pure."""

from __future__ import annotations

from typing import Final

#: Size of a serialised envelope. The public relay takes 64 MiB and never releases the memory.
MAX_ENVELOPE_BYTES: Final = 1024 * 1024
#: The number of a twin has 32 bits; 0 is no twin.
MAX_TWIN: Final = 2**32 - 1

#: Lifetime of a message that does not state one, and the longest lifetime, in seconds. Both values are the public peer's.
DEFAULT_TTL_S: Final = 300
MAX_TTL_S: Final = 1800
#: Seconds that a sender's clock may be ahead of ours. An envelope stamped further ahead is refused: a copy of it could be
#: replayed for as long.
MAX_AHEAD_S: Final = 300
#: Seconds after its end for which a receiver still takes an envelope, because clocks differ.
LATE_S: Final = 10

#: Lengths of an envelope's texts in bytes. A uid usually has 36; a schema is a MIME type, a connection any short name.
MAX_UID_BYTES: Final = 128
MAX_CONNECTION_BYTES: Final = 128
MAX_COMMAND_BYTES: Final = 255
MAX_TAGS_BYTES: Final = 1024
MAX_SCHEMA_BYTES: Final = 255
#: Length of the text of an error that goes to another program.
MAX_ERROR_TEXT_BYTES: Final = 1024

#: Length of a token in the query of a URL: tokens of public programs have some 200 bytes.
MAX_TOKEN_BYTES: Final = 2048
#: Lifetime of our tokens, and the longest that a relay accepts, in seconds (TypeScript clients ask for 1,000).
TOKEN_LIFETIME_S: Final = 60
MAX_TOKEN_LIFETIME_S: Final = 1800

#: A twin's relays: the chain keeps 1,024 bytes of them. Their number is limited too, because we try each once per message.
MAX_RELAYS: Final = 16
MAX_RELAYS_BYTES: Final = 1024
#: Relays that a peer may use itself; the public peer has the same limit.
MAX_OWN_RELAYS: Final = 4
#: Length of a twin's encryption key: the chain keeps 128 bytes.
MAX_PK_BYTES: Final = 128

#: A JSON message of a local program: the payload of the largest envelope in base64, and 64 KiB for the other members.
MAX_JSON_BYTES: Final = MAX_ENVELOPE_BYTES * 4 // 3 + 64 * 1024
#: A longer message is read too, up to this size, but only to tell the program that waits that it is too long. The public
#: peer sends a payload of 16 MiB, which has 22 MiB in base64.
READ_JSON_BYTES: Final = 24 * 1024 * 1024
#: Destinations of one JSON request: each gets an envelope of its own, which has to be encrypted and signed.
MAX_DESTINATIONS: Final = 256
#: Length of a client's own name for a request, and of the name of the list in which it awaits the answer.
MAX_REFERENCE_BYTES: Final = 1024

#: Cached keys that two twins share: 500 bytes each. Making one takes 30 µs.
SHARED_KEYS: Final = 4096
#: Messages that a receiver remembers until they expire, to detect duplicates: some 300 bytes each. Above this number it
#: forgets those that have expired, or else the oldest of the twin with the most.
SEEN_MESSAGES: Final = 65_536

#: Relays whose failures a ranker remembers, and failures that it counts of one relay.
RANKED_RELAYS: Final = 4096
RANKED_FAILURES: Final = 1024
