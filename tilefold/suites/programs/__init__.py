"""Programs as people write them, in classes: what `tilefold bench programs` compiles, checks and times."""
