"""Relay ranks: from clients' observations of relays to a signed document."""
