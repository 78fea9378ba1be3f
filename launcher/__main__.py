"""`python -m launcher`: the same as the command `effilaunch`."""

from launcher.cli import entry

if __name__ == "__main__":
    entry()
