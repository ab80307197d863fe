"""The command `lmc`.  A subcommand's module is imported when it runs, so that `lmc --help` stays cheap."""

from __future__ import annotations

import importlib
from typing import Any, Final

import click

from lmcache_core.errors import CacheError
from lmcache_core.spelling import did_you_mean

COMMANDS: Final = {
    "clear": (".control:clear", "Remove one namespace, or everything, from a daemon."),
    "config": (".config", "Check, show, begin or migrate a configuration file."),
    "conform": (".conform", "Run the conformance laws on a plugin."),
    "doctor": (".doctor", "Look at the whole setup, and say what to mend."),
    "drain": (".control:drain", "Have a daemon write what is not written, and take no new stores."),
    "du": (".store:du", "Show what a store holds, by namespace and age."),
    "explain": (".explain", "Say where two prompts part, or why a request missed."),
    "key": (".key", "Print the keys of a prompt's chunks."),
    "new": (".new", "Begin a plugin of your own: a complete package whose tests pass."),
    "pin": (".prompts:pin", "Keep a prompt's chunks in a daemon's memory."),
    "ping": (".control:ping", "Ask whether a daemon answers."),
    "plugins": (".plugins", "List the installed plugins without importing them."),
    "prefetch": (".prompts:prefetch", "Bring a prompt's chunks into a daemon's memory."),
    "repair": (".store:repair", "Remove from a store what is broken, and only that."),
    "serve": (".serve", "Run the daemon: one cache for every engine on this node."),
    "status": (".status", "Show how a daemon is."),
    "top": (".top", "Watch a daemon: requests, hits, tiers, the latest misses."),
    "unpin": (".prompts:unpin", "End what `lmc pin` keeps."),
    "verify": (".store:verify", "Read every record of a store, and say which are broken."),
}
"""Name: module (and the command in it, if it is not `command`) and the line that `--help` shows."""


class Failure(click.ClickException):
    """An error that a person can mend: its message and no traceback, exit status 2."""

    exit_code = 2


class LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        if cmd_name not in COMMANDS:
            ctx.fail(f"No such command {cmd_name!r}{did_you_mean(cmd_name, COMMANDS)}")
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module, __name__), name or "command")
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except CacheError as error:
            raise Failure(str(error)) from error


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="lmcache-core", prog_name="lmc")
def main() -> None:
    """A KV cache for LLM inference that lives outside the engine."""
