"""The layer graph as a picture, with the number of downsets at each cut."""
