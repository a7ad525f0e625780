"""The demonstration: a pretrained sentence encoder, compiled with Tilefold, on the lines of a text file."""
