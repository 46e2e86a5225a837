"""What has been measured so far, on disk: a calibration that is killed goes on from here. No torch.

`FILE.partial` holds one JSON object per line. The first one says what is measured; every other one
is what the first runs of a point took, or one run of one task:

    {"cluster": {...}}
    {"first": "copy memory 1 20480", "us": 13.1}
    {"task": "copy memory 1 20480", "us": 12.5, "launch_us": 12.5}
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from monta_megatron.files import add_json_line, read_json_lines, write_json_lines


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One run of one task, of its slowest rank.

    Attributes:
        task: its name.
        us: from the start to the result; see `measure` for CPU ranks.
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
        first_us: by a point's name, what its first runs took.
        samples: in the order in which they were taken.
    """

    path: Path
    cluster: dict[str, Any]
    first_us: dict[str, float] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)

    @classmethod
    def open(cls, path: Path, cluster: dict[str, Any]) -> "Record":
        """Go on with a file, or begin.

        Raises:
            ValueError: the file is of another cluster, or is none of these.
        """
        record = cls(path=path, cluster=cluster)
        advice = "remove it to measure anew"
        try:
            head, *entries = read_json_lines(path) or [{"cluster": cluster}]
            found = head["cluster"]
            for entry in entries:
                if "first" in entry:
                    record.first_us[entry["first"]] = float(entry["us"])
                else:
                    record.samples.append(Sample(**entry))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: is no record of a calibration; {advice}") from error
        for name, value in cluster.items():
            if found.get(name) != value:
                raise ValueError(
                    f"{path}: {name}: got {found.get(name)!r}, must be {value!r} as here; {advice}"
                )
        # Without the line that a kill has cut short.
        write_json_lines(path, [head, *entries])
        return record

    def add_first(self, point: str, us: float) -> None:
        """Keep what a point's first runs took, for another start."""
        add_json_line(self.path, {"first": point, "us": us})

    def add(self, sample: Sample) -> None:
        """Keep one sample."""
        self.samples.append(sample)
        add_json_line(self.path, asdict(sample))
