"""The messaging protocol without a network: frames, the link handshake, channels. Pure."""
