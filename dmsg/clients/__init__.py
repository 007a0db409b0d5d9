"""What a client of any relay protocol is made of: sessions kept up, dials, listening ports, open transports."""
