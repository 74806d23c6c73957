"""`bombus replay`: the debugger. Each subcommand is defined next to the code for what it shows, and is imported only
when it runs."""

import argparse

from bombus.cli import Command, add_subcommands, run_command

SUBCOMMANDS = {
    "timeline": Command("bombus.replay.timeline", "what happened, one line for each event", "server"),
    "episodes": Command("bombus.replay.episodes", "the ended episodes, sorted by their rewards", "server"),
    "state": Command("bombus.replay.state", "what the hive was doing at a position of its log", "server"),
    "diff": Command("bombus.replay.diff", "what changed between two positions", "server"),
    "episode": Command("bombus.replay.episode.command", "an episode in readable form, token by token", "server"),
    "lineage": Command("bombus.replay.lineage", "what a weights version was made of", "server"),
    "batch": Command("bombus_trainer.replay.batch", "write the samples of a step to a file", "trainer"),
    "train": Command("bombus_trainer.replay.train", "train a step again from the log, without inference", "trainer"),
    "what-if": Command("bombus_coordinator.what_if", "batch the same episodes under other rules", "coordinator"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_subcommands(parser, "replay", SUBCOMMANDS)


def run(arguments: argparse.Namespace) -> int:
    name = arguments.subcommand
    return run_command(f"bombus replay {name}", SUBCOMMANDS[name], arguments.arguments)
