"""Whole models of transformers and torchvision with random weights: what `tilefold bench models` compiles and times."""
