"""What stages of every target are written with."""
