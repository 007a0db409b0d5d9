"""The parts of a client of any relay protocol: sessions, dials, listening ports, open transports."""
