"""`python -m headgate` is the command line."""

from headgate.cli import app

app()
