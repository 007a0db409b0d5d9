"""The limits of envelopes, tokens and JSON messages, each with its unit and its reason. Pure."""

from __future__ import annotations

from typing import Final

#: An envelope, serialised. The public relay takes 64 MiB and gives back none of the memory.
MAX_ENVELOPE_BYTES: Final = 1024 * 1024
#: The numbers of twins are of 32 bits; 0 is no twin.
MAX_TWIN: Final = 2**32 - 1

#: Life of a message that does not say how long, and the longest there is, in seconds. Both are the public peer's.
DEFAULT_TTL_S: Final = 300
MAX_TTL_S: Final = 1800
#: A clock may be this much ahead of ours. An envelope stamped further ahead is refused: a copy of it could be sent again
#: for as long.
MAX_AHEAD_S: Final = 300
#: A receiver takes an envelope this long after its time, because clocks differ.
LATE_S: Final = 10

#: Lengths of an envelope's texts in bytes. A uid is 36 as a rule; a schema is a MIME type, a connection any short name.
MAX_UID_BYTES: Final = 128
MAX_CONNECTION_BYTES: Final = 128
MAX_COMMAND_BYTES: Final = 255
MAX_TAGS_BYTES: Final = 1024
MAX_SCHEMA_BYTES: Final = 255
#: The text of an error that goes to another program.
MAX_ERROR_TEXT_BYTES: Final = 1024

#: A token in the query of a URL: the public ones have some 200 bytes.
MAX_TOKEN_BYTES: Final = 2048
#: Life of a token, in seconds: ours, and the longest that a relay takes (TypeScript clients ask for 1,000).
TOKEN_LIFETIME_S: Final = 60
MAX_TOKEN_LIFETIME_S: Final = 1800

#: A twin's relays: the chain keeps 1,024 bytes of them. We try each once a message, so their number counts too.
MAX_RELAYS: Final = 16
MAX_RELAYS_BYTES: Final = 1024
#: As many relays as the public peer takes for itself.
MAX_OWN_RELAYS: Final = 4
#: A twin's encryption key: the chain keeps 128 bytes.
MAX_PK_BYTES: Final = 128

#: A JSON message of a local program: the payload in base64, and as much again for the rest of it, but 64 KiB at least.
MAX_JSON_BYTES: Final = MAX_ENVELOPE_BYTES * 4 // 3 + 64 * 1024
#: Destinations of one JSON request: each is an envelope of its own, with an encryption and a signature.
MAX_DESTINATIONS: Final = 256
#: A client's own name of a request, and of the list it awaits the answer in.
MAX_REFERENCE_BYTES: Final = 1024

#: Keys that two twins share, kept: 500 bytes each. Making one takes 30 µs.
SHARED_KEYS: Final = 4096
#: Messages that a receiver has seen and remembers until they are over: some 300 bytes each. Above that, the oldest of the
#: twin with the most are forgotten.
SEEN_MESSAGES: Final = 65_536

#: Relays with failures that a ranker knows, and failures of one of them. More is no worse.
RANKED_RELAYS: Final = 4096
RANKED_FAILURES: Final = 1024
