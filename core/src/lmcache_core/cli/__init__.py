"""The command `lmc`.  A subcommand's module is imported when it runs, so that `lmc --help` stays cheap.

Installed packages add subcommands by entry points of the group `lmcache_core.commands`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any, Final

import click

from lmcache_core.errors import CacheError
from lmcache_core.spelling import did_you_mean

COMMANDS: Final = {
    "bench": (".bench:group", "Measure a store, a device or a server."),
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
    """Subcommands by name, from this package and from what is installed beside it."""

    def __init__(self, *args: Any, own: Mapping[str, tuple[str, str]] = COMMANDS, under: str = "", **more: Any) -> None:
        super().__init__(*args, **more)
        self._own = own
        self._under = under
        """Of the names of entry points whose commands belong here: "bench." """

    def _others(self) -> dict[str, str]:
        """What installed packages offer here, and from where.  `plugins`, which imports more, is for whom runs one."""
        found = {}
        for point in entry_points(group="lmcache_core.commands"):
            name = point.name.removeprefix(self._under)
            if point.dist is not None and point.name.startswith(self._under) and name not in self._own:
                found[name] = f"From {point.dist.name} {point.dist.version}."
        return {name: line for name, line in sorted(found.items()) if "." not in name}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*self._own, *self._others()])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        if cmd_name not in self._own:
            others = self._others()
            if cmd_name not in others:
                ctx.fail(f"No such command {cmd_name!r}{did_you_mean(cmd_name, [*self._own, *others])}")
            from lmcache_core import plugins

            found: click.Command = plugins.load_command(plugins.resolve(plugins.COMMANDS, self._under + cmd_name))
            return found
        module, _, name = self._own[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module, __name__), name or "command")
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        lines = {name: line for name, (_, line) in self._own.items()} | self._others()
        if lines:
            with formatter.section("Commands"):
                formatter.write_dl(sorted(lines.items()))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except CacheError as error:
            raise Failure(str(error)) from error


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="lmcache-core", prog_name="lmc")
def main() -> None:
    """A KV cache for LLM inference that lives outside the engine."""
