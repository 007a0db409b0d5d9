"""The dmsg protocol: Noise XK connections to relays, frames, and transports between two clients."""
