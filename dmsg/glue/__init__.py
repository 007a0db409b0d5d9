"""What joins a pure core to the reactor; knows no protocol."""
