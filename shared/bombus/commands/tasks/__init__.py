"""The subcommands for ready tasks: `bombus tasks` lists them, `bombus run` plays them."""
