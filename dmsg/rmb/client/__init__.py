"""The client with which programs call and serve commands: connections to several relays, and the calls on top."""
