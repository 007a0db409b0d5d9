"""What the processes of a bench can be."""
