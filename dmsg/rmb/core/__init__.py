"""The Reliable Message Bus without a network: envelopes, signatures, tokens, encryption, limits, ranks. Pure."""
