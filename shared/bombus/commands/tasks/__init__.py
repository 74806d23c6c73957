"""The subcommands for ready tasks: `bombus tasks` lists them, `bombus run` and `bombus eval` play them."""
