"""Cluster files: read with their checksum checked, and written with it by a calibration.

A file that was cut short may still be YAML, with fewer curves, and plan something else. The last
line of a measured cluster is therefore a checksum of what was measured. Name, source, sizes and
memory may be changed by hand; who changes the costs says so with `checksum: edited`.
"""

from pathlib import Path
from typing import Any

from monta_megatron.common import presets, strict_yaml
from monta_megatron.common.rules import hash_of
from monta_megatron.planner.cluster import Cluster

MEASURED = ("launch", "links", "curves", "contention")
# Part of the checksum where it is given.
ALSO_MEASURED = "experts"
EDITED = "edited"


def load_cluster(path: str | Path) -> Cluster:
    """Read a cluster file, or the preset of that name.

    Raises:
        ValueError: one line that names the file, the key, the value and the rule.
    """
    path = presets.find("clusters", path)
    data = strict_yaml.read(path)
    if isinstance(data, dict):
        checksum = data.pop("checksum", None)
        if data.get("kind") == "measured" and checksum != EDITED:
            _check(checksum, data, path)
    if isinstance(data, dict) and ALSO_MEASURED in data:
        from monta_megatron.planner.expert_curve import ClusterWithExperts

        return strict_yaml.build(ClusterWithExperts, data, str(path))
    return strict_yaml.build(Cluster, data, str(path))


def dump_measured(cluster: Cluster) -> str:
    """A calibrated cluster as the text of its file."""
    data = strict_yaml.plain(cluster)
    return strict_yaml.dump({**data, "checksum": _checksum_of(data)})


def _check(checksum: Any, data: dict[str, Any], path: str | Path) -> None:
    if checksum is None:
        raise ValueError(
            f"{path}: checksum: missing, must be the last line of a measured cluster; calibrate "
            f"again if the file was cut short, or end it with checksum: {EDITED} if it was written "
            "by hand"
        )
    if checksum != _checksum_of(data):
        raise ValueError(
            f"{path}: checksum: got {checksum}, must be that of {', '.join(MEASURED)}, which "
            f"were changed or cut short; calibrate again, or write checksum: {EDITED} to use them "
            "as they are"
        )


def _checksum_of(data: dict[str, Any]) -> str:
    measured = [*MEASURED, *([ALSO_MEASURED] if data.get(ALSO_MEASURED) else [])]
    return f"{hash_of({name: data.get(name) for name in measured}):016x}"
