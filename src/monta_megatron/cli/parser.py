"""The parser of `monta` and its sub-commands: flags, messages of mistakes, standard output."""

import argparse
import contextlib
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from monta_megatron.common import first_rank
from monta_megatron.common.text import nearest, one_of, same_name


def add_json(parser: Any) -> None:
    """Add --json to a parser, or to a group of one."""
    parser.add_argument("--json", action="store_true", help="print one JSON document")


@contextlib.contextmanager
def only_the_report() -> Iterator[None]:
    """Send output of Megatron and the dispatchers to standard error, and drop warnings."""
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# Flags of one meaning, those of other tools among them. A flag that a command does not know is
# answered with the one of its line that it knows.
SAME_MEANING = (
    ("--world-size", "--ranks", "--num-ranks", "--gpus", "--num-gpus", "--ngpus", "--nranks"),
    ("--nodes", "--num-nodes", "--nnodes", "--num-hosts", "--hosts"),
    ("--ranks-per-node", "--gpus-per-node", "--nproc-per-node", "--ntasks-per-node"),
    ("--nics-per-node", "--num-nics", "--nics", "--hcas-per-node"),
    ("--tp", "--tensor-model-parallel-size", "--tensor-parallel-size", "--tp-size"),
    ("--ep", "--expert-model-parallel-size", "--expert-parallel-size", "--ep-size"),
    ("--etp", "--expert-tensor-parallel-size", "--etp-size"),
    ("--pp", "--pipeline-model-parallel-size", "--pipeline-parallel-size", "--pp-size"),
    ("--cp", "--context-parallel-size", "--cp-size"),
    ("--tokens", "--num-tokens", "--tokens-per-rank"),
    ("--seq-length", "--sequence-length", "--seq-len", "--seqlen", "--max-seq-len"),
    ("--micro-batch-size", "--micro-batch", "--mbs"),
    ("--global-batch-size", "--global-batch", "--batch-size", "--gbs"),
    ("--experts", "--num-experts", "--n-experts"),
    ("--top-k", "--topk", "--moe-router-topk", "--num-experts-per-tok"),
    ("--hidden", "--hidden-size", "--hidden-dim"),
    ("--ffn-hidden", "--moe-ffn-hidden-size", "--moe-intermediate-size"),
    ("--num-chunks", "--chunks"),
    ("--chain", "--chains", "--dispatcher"),
    ("--config", "--run", "--run-file", "--recipe"),
    ("--run-directory", "--output-dir", "--outdir"),
    ("--out", "--output", "-o"),
    ("--from", "--hf", "--hf-config", "--huggingface"),
    ("--model", "--model-name", "--arch"),
    ("--cluster", "--system", "--hardware"),
    ("--network-rate", "--nic-rate", "--ib-rate", "--inter-rate"),
    ("--node-link-rate", "--nvlink-rate", "--intra-rate"),
    ("--memory-limit-gb", "--memory-limit"),
    ("--memory-gb-per-rank", "--gpu-memory-gb", "--memory-gb"),
    ("--inter-mbit", "--mbit", "--rate"),
    ("--iterations", "--iters", "--train-iters", "--steps"),
    ("--dry-run", "--dryrun", "--no-run"),
)


class _HelpFormatter(argparse.HelpFormatter):
    """Wraps a description, and leaves the lines of examples as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)


class Parser(argparse.ArgumentParser):
    """A parser that leaves the usage to `--help` and reports an error in one line.

    Flags are written in full. A name among choices is taken whatever its case, `-` or `_`.

    Attributes:
        after_dashes: where the words after `--` are kept; None where argparse reads them.
        moved: flags that have left -> the script of the repository that takes them.
    """

    def __init__(self, **settings: Any) -> None:
        settings |= {"formatter_class": _HelpFormatter, "allow_abbrev": False}
        super().__init__(**settings)
        self.after_dashes: str | None = None
        self.moved: Mapping[str, str] = {}

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, and refuse unknown flags here, where the known ones can be named.

        An unknown flag is named before a missing one, which it may have been meant for.
        """
        words = list(sys.argv[1:] if args is None else args)
        rest: list[str] = []
        if self.after_dashes is not None and "--" in words:
            place = words.index("--")
            words, rest = words[:place], words[place + 1 :]
        unknown = self._first_unknown(words)
        if unknown is not None:
            self._refuse([unknown])
        parsed, extras = super().parse_known_args(words, namespace)
        if extras:
            self._refuse(extras)
        if self.after_dashes is not None:
            setattr(parsed, self.after_dashes, rest)
        return parsed, extras

    def _first_unknown(self, words: Sequence[str]) -> str | None:
        """The first flag that this parser does not know; None where another parser reads it."""
        known = self._option_string_actions
        if any(action.nargs == argparse.PARSER for action in self._actions):
            # The sub-command's flags are its parser's, which is asked itself.
            return None
        takes_rest = any(
            action.nargs == argparse.REMAINDER and not action.option_strings
            for action in self._actions
        )
        position = 0
        while position < len(words):
            word = words[position]
            name = word.partition("=")[0]
            position += 1
            if word == "--":
                return None
            if name in known:
                if known[name].nargs == argparse.REMAINDER:
                    return None
                # The value of a flag; one that is missing is argparse's to report.
                takes_value = known[name].nargs is None and name == word
                has_value = position < len(words) and not words[position].startswith("--")
                position += takes_value and has_value
            elif word.startswith("--") or (word[:1] == "-" and word[1:2].isalpha()):
                # "-h" and "-m" may have their value in the same word.
                if word[:2] not in known or word.startswith("--"):
                    return word
            elif takes_rest:
                return None
        return None

    def _refuse(self, words: Sequence[str]) -> NoReturn:
        """Report words that are not known, with the flag that the first of them means."""
        flag = next((word for word in words if word.startswith("-")), words[0]).partition("=")[0]
        if flag in self.moved:
            self.error(f"{flag}: belongs to a script now, run python {self.moved[flag]} --help")
        meant = self._meant(flag) if flag.startswith("-") else None
        advice = "" if meant is None else f"; did you mean {meant}?"
        self.error(f"unrecognized arguments: {' '.join(words)}{advice}")

    def _meant(self, flag: str) -> str | None:
        """The known flag of the same meaning, else the one that is spelled most alike."""
        known = self._option_string_actions
        plain = flag.casefold().replace("_", "-")
        meaning = next((line for line in SAME_MEANING if plain in line), ())
        of_meaning = [name for name in meaning if name in known]
        if of_meaning or plain in known:
            return plain if plain in known else of_meaning[0]
        # A flag with a meaning of its own is not a slip of the pen for another one.
        return None if meaning else nearest(plain, known)

    def _get_value(self, action: argparse.Action, text: str) -> Any:
        value = super()._get_value(action, text)
        is_choice = action.choices is not None and action.nargs != argparse.PARSER
        if is_choice and isinstance(value, str) and value not in (action.choices or ()):
            return same_name(value, map(str, action.choices or ())) or value
        return value

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """As argparse does, for choices and sub-commands, in the words of our other messages."""
        if action.choices is not None and value not in action.choices:
            rule = one_of(value, map(str, action.choices))
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}, must be {rule}")

    def error(self, message: str) -> NoReturn:
        line = " ".join(message.split()).removeprefix("argument ")
        first_rank.report(f"{self.prog}: {line}")
        self.exit(2)
