"""Subcommands of `bombus` that do not belong to a service."""
