"""The command line: one module a command, imported when the command is called."""

from __future__ import annotations

import gc
import importlib
import sys
import traceback
from typing import Any

import click

from tlcache import __version__
from tlcache.errors import TlcacheError, UsageError

__all__ = ["cli", "main"]

# Each command's one-line help stands here, so that `--help` imports no command.
_COMMANDS = {
    "warm": "Compile the kernels of a shapes.json before a process needs them.",
    "run": "Run a program, its kernels warm, with hooks on TileLang.",
    "record": "Write the workloads that running processes met as a shapes.json.",
    "shapes": "Write a shapes.json for the model of a Hugging Face config.json.",
    "tune": "Find the fastest schedules of a shapes.json's workloads on this GPU.",
    "ls": "List the kernels under a cache root.",
    "inspect": "Show everything about one kernel.",
    "diff": "Show what differs between two kernels.",
    "du": "Show what takes how much of the disk, by version, target and operator.",
    "why": "Say for each workload that is not in the cache what would have to be otherwise.",
    "stats": "Show what running processes do with their kernels.",
    "top": "Watch what running processes do: the same as `tlcache stats --watch`.",
    "verify": "Check every file of a cache, and who could have written it.",
    "prune": "Delete kernels with their records, and the cuda-binaries that only they need.",
    "export": "Write kernels of a cache into one archive, to a file or URL.",
    "import": "Check archives, and take their kernels into a cache root.",
    "doctor": "Check the cache and this machine, and say what to do about each fault.",
    "key": "Print the version key of this environment, and what it is made of.",
    "config": "Show the settings in force, and where each value came from.",
    "env": "Print the exports that put a process on a cache root of its own version key.",
    "daemon": "Watch, bound and serve caches, continuously.",
}
_MODULES = {"import": "import_"}  # a word of Python's


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"tlcache.cli.{_MODULES.get(cmd_name, cmd_name)}")
        command = module.command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in _COMMANDS and not args[0].startswith("-"):
            import difflib

            near = difflib.get_close_matches(args[0], _COMMANDS, 1)
            raise UsageError(
                f"no command {args[0]!r}; there are {', '.join(_COMMANDS)}",
                hint=f"did you mean `tlcache {near[0]}`?" if near else "`tlcache --help`",
            )
        return super().resolve_command(ctx, args)


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="tlcache %(version)s")
@click.option("--debug", is_flag=True, help="Show a traceback with an error.")
@click.pass_context
def cli(ctx: click.Context, debug: bool) -> None:
    """Inspect, prewarm and restore TileLang's compile cache, so that serving processes start
    fast.
    """
    ctx.obj = {"debug": debug}


def main(args: list[str] | None = None) -> None:
    """Run the command line, and exit with its code: 0 done, 1 not so, 2 wrong input, 3 wrong
    machine.
    """
    arguments = sys.argv[1:] if args is None else args
    gc.disable()  # what a command makes it needs to its end; a listing of 60,000 is 7 % faster
    try:
        result: Any = cli.main(arguments, prog_name="tlcache", standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        sys.exit(0)
    except click.ClickException as error:
        click.echo(f"error: {error.format_message()}", err=True)
        if isinstance(error, click.UsageError) and error.ctx is not None:
            click.echo(f"\nhint: `{error.ctx.command_path} --help` shows what there is", err=True)
        sys.exit(error.exit_code)
    except TlcacheError as error:
        if "--debug" in arguments:
            traceback.print_exc()
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    except SystemExit:
        if type(sys.stdout).__name__.endswith("PacifyFlushWrapper"):
            sys.exit(0)  # who read our output has left, as `head` does; click makes it a 1
        raise
    sys.exit(result if isinstance(result, int) else 0)
