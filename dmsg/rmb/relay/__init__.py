"""The relay: sessions over WebSocket, queues for who is away, federation with other relays."""
