"""Subcommands of `bombus` that belong to no service."""
