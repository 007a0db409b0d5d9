"""Keys, Noise handshakes and sealed records; pure: no Twisted, no clock, randomness only as an argument."""
