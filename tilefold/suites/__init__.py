"""Packaged sets of programs: the cascades that must fuse, and the benchmarks."""
