"""Tilefold inside other libraries: one package each, imported only by whoever has the library."""
