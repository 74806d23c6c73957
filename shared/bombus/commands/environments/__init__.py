"""`bombus env` and its subcommands."""
