"""Relay ranks: from what clients saw of relays to a signed document."""
