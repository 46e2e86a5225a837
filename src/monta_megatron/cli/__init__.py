"""The `monta` command. The docstring of a function that runs a sub-command is its help.

Exit status 0 on success; 1 where the answer is no (bench: a mismatch, place: refused, doctor:
something is missing); 2 on bad input, with one line on stderr that names the field, the value and
the rule; 130 after Ctrl-C; 141 if the reader closed the pipe; that of the run for launch. With
`--json`, standard output holds one JSON document and nothing else.
"""

import os
import signal
import sys
import time

from monta_megatron.common.errors import UserError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import ArgumentParser
    from collections.abc import Sequence
    from types import FrameType

# Modules here -> their sub-commands. For each NAME a module has `add_NAME_arguments`, `run_NAME`,
# and perhaps `check_NAME`, with which `emulate` finds mistakes before any rank starts.
COMMANDS = {
    "planning": ("plan", "timeline", "place"),
    "on_ranks": ("calibrate", "bench", "emulate"),
    "training": ("launch", "compare", "doctor"),
}

# The statuses with which a shell reports processes ended by SIGINT and SIGPIPE.
INTERRUPTED, UNREAD = 130, 141
# Modules without which no command runs -> their packages.
REQUIRED = {"numpy": "numpy", "yaml": "pyyaml"}
# Seconds in which an interrupt of a launch reaches all of its ranks.
INTERRUPT_REACHES_ALL_S = 1.0


def build_parser() -> "ArgumentParser":
    """The parser of `monta` with all sub-commands."""
    from importlib import import_module
    from inspect import getdoc

    from monta_megatron.cli.parser import Parser
    from monta_megatron.common import __version__

    parser = Parser(prog="monta", description="Expert-parallel token dispatch for Megatron-Core.")
    parser.add_argument(
        "--version",
        action="version",
        version=f"monta-megatron {__version__}",
        help="Print the version and exit.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module_name, names in COMMANDS.items():
        module = import_module(f"monta_megatron.cli.{module_name}")
        for name in names:
            run = getattr(module, f"run_{name}")
            text = getdoc(run) or name
            command = commands.add_parser(name, help=text.partition("\n")[0], description=text)
            command.add_argument("--json", action="store_true", help="Print one JSON document.")
            getattr(module, f"add_{name}_arguments")(command)
            command.set_defaults(run=run, check=getattr(module, f"check_{name}", None))
    return parser


def main(arguments: "Sequence[str] | None" = None, parser: "ArgumentParser | None" = None) -> int:
    """Run one sub-command; returns the exit status.

    Args:
        arguments: command-line arguments, without the program's name; None for those of `sys`.
        parser: parser to use in place of `monta`'s, with `run` and `command` among its defaults.
    """
    words = sys.argv[1:] if arguments is None else arguments
    command = " ".join(["monta", *words[:1]])
    rank = os.environ.get("RANK")
    interrupted = False

    def interrupt(number: int, frame: "FrameType | None") -> None:
        nonlocal interrupted
        interrupted = True
        if rank is not None:
            # A launcher passes on what has reached this rank already.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        # An import may lose the exception, or make it an ImportError.
        while frame is not None:
            if frame.f_code.co_filename.startswith("<frozen importlib"):
                if rank in (None, "0"):
                    os.write(2, f"{command}: interrupted\n".encode())
                os._exit(INTERRUPTED)
            frame = frame.f_back
        raise KeyboardInterrupt

    handler_before = signal.getsignal(signal.SIGINT)
    # A background job of a shell ignores it; a launcher that is one passes it on to its ranks.
    if rank is not None or handler_before is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    try:
        from monta_megatron.common import ranks

        try:
            parsed = (parser or build_parser()).parse_args(words)
            command = f"monta {parsed.command}"
            return int(parsed.run(parsed))
        except RuntimeError:
            # A rank that has lost its peers may be the last to be interrupted; and autograd may
            # raise the error about lost peers in place of the interrupt.
            if rank is not None:
                time.sleep(INTERRUPT_REACHES_ALL_S)
            if interrupted:
                raise KeyboardInterrupt from None
            raise
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except UserError as error:
        ranks.report(f"{command}: {error}")
        return 2
    except ModuleNotFoundError as error:
        if error.name not in REQUIRED:
            raise
        packages = " ".join(REQUIRED.values())
        print(f"{command}: {error.name} is not installed: pip install {packages}", file=sys.stderr)
        return 2
    except OSError as error:
        # What is left in the buffer goes nowhere.
        if sys.stdout is sys.__stdout__:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        # The reader has closed the pipe, as in `monta plan ... | head`.
        if isinstance(error, BrokenPipeError):
            return UNREAD
        ranks.report(f"{command}: {error}")
        return 2
    except KeyboardInterrupt:
        # Nothing interrupts the line.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if rank in (None, "0"):
            print(f"{command}: interrupted", file=sys.stderr)
        return INTERRUPTED
    finally:
        if signal.getsignal(signal.SIGINT) is interrupt:
            # The end of Python would show a traceback.
            handler = signal.SIG_DFL if arguments is None else handler_before
            signal.signal(signal.SIGINT, handler)
