"""The GPU benchmarks: RedFuser's and Neptune's tables, with peers, floors and bars."""
