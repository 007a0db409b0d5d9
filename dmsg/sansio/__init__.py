"""Building blocks of the pure protocol cores: buffers, windows, limits and the contract the shell drives."""
