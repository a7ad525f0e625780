"""`python -m tilefold`: the command line, where the command `tilefold` is not on the path."""

from tilefold.cli import app

if __name__ == "__main__":
    app()
