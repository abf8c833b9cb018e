"""`python -m autoddl.cli` is the program `autoddl`."""

from autoddl.cli.main import program

program()
