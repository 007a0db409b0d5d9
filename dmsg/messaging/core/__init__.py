"""The messaging protocol without a network (:ref:`spec-messaging`): frames, the link handshake, channels. Pure."""
