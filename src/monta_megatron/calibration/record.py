"""What has been measured so far, on disk: a calibration that is killed goes on from here. No torch.

`FILE.partial` holds one JSON object per line. The first one says what is measured; every other one
is one run of one task:

    {"cluster": {...}, "pairs": [["alltoall inter 2 327680", "copy memory 1 81920", 9], ...]}
    {"task": "copy memory 1 20480", "us": 12.5, "launch_us": 12.5}
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One run of one task, of its slowest rank.

    Attributes:
        task: its name.
        us: from the start to the result.
        launch_us: of that, until the host was free again.
    """

    task: str
    us: float
    launch_us: float


@dataclass(kw_only=True)
class Record:
    """What a file of samples holds.

    Attributes:
        path: the file.
        cluster: what was measured: numbers and versions that samples have to share.
        pairs: first point, second point and repeats; None before that was decided.
        samples: in the order in which they were taken.
    """

    path: Path
    cluster: dict[str, Any]
    pairs: list[list[Any]] | None = None
    samples: list[Sample] = field(default_factory=list)

    @classmethod
    def open(cls, path: Path, cluster: dict[str, Any]) -> "Record":
        """Go on with a file, or begin.

        Raises:
            ValueError: the file is of another cluster, or is none of these.
        """
        record = cls(path=path, cluster=cluster)
        if not path.exists():
            return record
        advice = "remove it to measure anew"
        try:
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            # A line that a kill has cut short is measured again.
            entries = [json.loads(line) for line in lines if line.endswith("\n")]
            if not entries:
                return record
            head, record.samples = entries[0], [Sample(**entry) for entry in entries[1:]]
            found, record.pairs = head["cluster"], head["pairs"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: is no record of a calibration; {advice}") from error
        for name, value in cluster.items():
            if found.get(name) != value:
                raise ValueError(
                    f"{path}: {name}: got {found.get(name)!r}, must be {value!r} as here; {advice}"
                )
        record._write_all()
        return record

    def begin(self) -> None:
        """Write the first line."""
        self._write_all()

    def add(self, sample: Sample) -> None:
        """Keep one sample."""
        self.samples.append(sample)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(sample)) + "\n")

    def _write_all(self) -> None:
        entries = [
            {"cluster": self.cluster, "pairs": self.pairs},
            *(asdict(sample) for sample in self.samples),
        ]
        text = "".join(json.dumps(entry) + "\n" for entry in entries)
        write_whole(self.path, text)


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all.

    Raises:
        ValueError: it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise ValueError(f"{path}: cannot be written: {error.strerror}") from error
