"""The dmsg protocol's client: sessions with relays, listeners, dials and transports."""
