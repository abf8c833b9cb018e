"""`python -m autoddl.cli` is the program `autoddl`."""

from autoddl.cli.start import program

program()
