"""The dmsg protocol without sockets: frames, handshakes, streams. Pure."""
