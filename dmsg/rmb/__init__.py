"""The Reliable Message Bus: envelopes between numbered twins, over relays that speak WebSocket and forward to each other."""
