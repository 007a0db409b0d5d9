"""The client of the messaging system: links to relays, channels as Twisted transports."""
