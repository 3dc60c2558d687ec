"""The training loop that the command line runs. Knows everything below; nothing below knows it."""
