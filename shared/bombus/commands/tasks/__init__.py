"""The subcommands for ready-made tasks: `bombus tasks` lists them, `bombus run` and `bombus eval` play them."""
