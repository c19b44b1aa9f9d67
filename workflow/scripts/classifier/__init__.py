"""The built-in program: an image classifier."""
