"""Settings of a calibration, and its samples on disk: a killed one can be resumed. No torch.

`FILE.partial` holds one JSON object per line. The first one says what is measured; each of the
others holds the time of a point's first runs, or of one run of one task:

    {"cluster": {...}}
    {"first": "copy memory 1 20480", "us": 13.1}
    {"task": "copy memory 1 20480", "us": 12.5, "launch_us": 12.5}
"""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from monta_megatron.calibration.tasks import Sample
from monta_megatron.common.files import add_json_line, read_json_lines


def partial_of(out: Path) -> Path:
    """The file of samples beside a cluster file."""
    return out.with_name(f"{out.name}.partial")


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Keep other calibrations from a record while the context lasts, or this process does.

    Args:
        path: the record; an empty one is made if there is none, and removed if it stays empty.

    Raises:
        ValueError: another calibration has it, or it cannot be written.
    """
    try:
        with _locked(path):
            try:
                yield
            finally:
                if path.exists() and path.stat().st_size == 0:
                    path.unlink()
    except OSError as error:
        raise ValueError(f"{path}: cannot be written: {error.strerror}") from error


def _locked(path: Path) -> BinaryIO:
    while True:
        file = path.open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.close()
            raise ValueError(
                f"{path}: is being written by another calibration; wait until that one has ended, "
                "or name another file with --out"
            ) from error
        except OSError as error:
            # Some file systems know no locks; a cluster on one is to be calibrated all the same.
            if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
                raise
        # The calibration that had it has removed it when it ended, perhaps since we opened it.
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
        file.close()


@dataclass(kw_only=True)
class Record:
    """Content of a file of samples.

    Attributes:
        path: the file.
        cluster: what was measured: the numbers and versions that all samples have to share.
        first_us: by a point's name, the time of its first runs.
        samples: all samples, in the order in which they were taken.
    """

    path: Path
    cluster: dict[str, Any]
    first_us: dict[str, float] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)

    @classmethod
    def open(cls, path: Path, cluster: dict[str, Any]) -> "Record":
        """Continue an existing file, or start a new one.

        Raises:
            ValueError: the file is of another cluster, or is not a record.
        """
        record = cls(path=path, cluster=cluster)
        advice = "remove it to measure anew"
        try:
            head, *entries = read_json_lines(path) or [{"cluster": cluster}]
            former = head["cluster"]
            for entry in entries:
                if "first" in entry:
                    record.first_us[entry["first"]] = float(entry["us"])
                else:
                    record.samples.append(Sample(**entry))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: is no record of a calibration; {advice}") from error
        for name, value in cluster.items():
            if former.get(name) != value:
                raise ValueError(
                    f"{path}: {name}: got {former.get(name)!r}, must be {value!r} as here; {advice}"
                )
        # Drop a line that a kill has cut short; in place, since the file may be locked.
        whole = path.read_bytes().rpartition(b"\n")[0] if path.exists() else b""
        if whole:
            os.truncate(path, len(whole) + 1)
        else:
            path.write_bytes(b"")
            add_json_line(path, head)
        return record

    def add_first(self, point: str, us: float) -> None:
        """Keep the time of a point's first runs, for a later start."""
        add_json_line(self.path, {"first": point, "us": us})

    def add(self, sample: Sample) -> None:
        """Keep one sample."""
        self.samples.append(sample)
        add_json_line(self.path, asdict(sample))
