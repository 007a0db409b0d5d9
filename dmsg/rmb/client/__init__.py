"""Programs that call and serve commands over relays: connections to several of them, and the calls on top."""
