"""`monta new`: every file that it writes loads, or is refused with all that is to be filled in."""

import json
import math
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from published_configs import CONFIGS, NO_PRESET

from monta_megatron.cli import main
from monta_megatron.cli.new import GPU_NAMES
from monta_megatron.common import presets, strict_yaml
from monta_megatron.common.field_texts import field_texts
from monta_megatron.planner.cluster import Cluster, Link
from monta_megatron.planner.cluster_file import load_cluster
from monta_megatron.planner.curves import HostCosts
from monta_megatron.planner.models.files import load_model
from monta_megatron.planner.models.model import Model
from monta_megatron.tools.launch.run_config import RunConfig, RunLayout
from monta_megatron.tools.new import hardware
from monta_megatron.tools.new.hardware import Gpus, Interfaces

SIZES = "--hidden-size 2048 --num-layers 24 --num-attention-heads 16 --num-experts 64"
SIZES += " --moe-router-topk 6 --moe-ffn-hidden-size 1408 --num-parameters-billions 14.3"
ON_PCIE, FOUR = ("A30", "L40S"), "--nics-per-node 4 --network-rate 200G"
EIGHT = "--ranks-per-node 8 --nics-per-node 8 --network-rate 400Gb/s"
LOADERS: dict[str, Callable[[Path], Any]] = {
    "model": load_model,
    "cluster": load_cluster,
    "run": lambda path: strict_yaml.load(RunConfig, path),
}
WRITTEN = [
    *(f"model --from {name}" for name in CONFIGS),
    f"model {SIZES}",
    f"model {SIZES} --num-query-groups 4 --dtype fp16",
    *(f"cluster --gpu {gpu} --num-nodes 4 {EIGHT}" for gpu in GPU_NAMES if gpu not in ON_PCIE),
    *(f"cluster --gpu {gpu} --num-nodes 4 --ranks-per-node 8 {FOUR}" for gpu in ON_PCIE),
    f"cluster {EIGHT} --num-nodes 2 --node-link-rate 300GB/s --memory-rate 2TB/s",
    "cluster --gpu H100 --num-nodes 1 --ranks-per-node 8",
    "run --model mixtral_8x7b --cluster h100_8x_ndr --nodes 2",
    "run --model qwen3_235b_a22b --cluster h100_8x_ndr --nodes 16 --tp 2 --ep 16 --pp 2",
    "run --model deepseek_v3 --cluster h100_8x_ndr --nodes 8 --ep 64 --ignore-memory",
    "run --model qwen3_30b_a3b --cluster a100_hdr --nodes 2 --ep 8 --seq-length 8192 --name mine",
]
# Values of a training that its report has and the config.json lacks or has for fine-tuning: initial
# weights of both DeepSeek papers and of Mixtral by Megatron-MoE-ModelZoo; losses likewise, and
# the z-loss of OLMoE's paper. Multi-token prediction is in DeepSeek-V3, but not in its benchmark.
OF_THE_TRAINING = ("init-method-std", "moe-aux-loss-coeff", "moe-z-loss-coeff")
NOT_IN_THE_RUN = ("mtp-num-layers",)
COMMENTED_KEY = re.compile(r"^( *)#(\w+: \S)", re.MULTILINE)


@pytest.fixture(autouse=True)
def bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU, no Slurm, an empty folder; what the host's /sys holds is no matter of these tests."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("SLURM_JOB_NUM_NODES", "SLURM_NNODES", "NCCL_IB_HCA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(hardware, "SYS", tmp_path / "sys")
    monkeypatch.setattr(hardware, "ROUTES", tmp_path / "route")


def new(words: str) -> None:
    assert main(["new", *shlex.split(words)]) == 0


def config(name: str, folder: Path) -> Path:
    path = folder / name / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(CONFIGS[name]))
    return path.parent


@pytest.mark.parametrize("words", WRITTEN)
def test_what_is_written_loads(words: str, tmp_path: Path) -> None:
    if "--from" in words:
        words = f"model --from {config(words.split()[-1], tmp_path)}"
    new(f"{words} --out file.yaml")
    load = LOADERS[words.split()[0]]
    file = Path("file.yaml")
    loaded = load(file)
    # A key behind a # says what holds without it.
    text = file.read_text()
    file.write_text(COMMENTED_KEY.sub(r"\1\2", text))
    assert load(file) == loaded


@pytest.mark.parametrize("name", CONFIGS)
def test_a_converted_config_is_the_model(name: str, tmp_path: Path) -> None:
    folder = config(name, tmp_path)
    new(f"model --from {folder} --out model.yaml")
    model, converted = load_model(folder), load_model("model.yaml")
    assert strict_yaml.plain(converted) == {**strict_yaml.plain(model), "assumed": []}
    assert converted.notes == model.taken


@pytest.mark.parametrize(
    ("words", "cls"),
    [
        (WRITTEN[0], Model),
        *((f"cluster --gpu H100 --num-nodes 4 {EIGHT}", cls) for cls in (Cluster, HostCosts, Link)),
        *((WRITTEN[-1], cls) for cls in (RunConfig, RunLayout)),
    ],
)
def test_every_field_has_its_comment(words: str, cls: type[Any], tmp_path: Path) -> None:
    if "--from" in words:
        words = f"model --from {config(words.split()[-1], tmp_path)}"
    new(f"{words} --out file.yaml")
    text = Path("file.yaml").read_text()
    comments = " ".join(re.sub(r"\n *# ?", " ", text).split())
    for entry in field_texts(cls):
        if entry.name not in ("assumed", "calibrated_node", "curves", "doubts"):
            assert f"{entry.meaning} (" in comments, entry.name
            assert re.search(rf"^[ -]*#?{entry.name}:", text, re.MULTILINE), entry.name


def test_what_is_to_be_filled_in_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    new("cluster --num-nodes 4 --out cluster.yaml")
    expected = "ranks_per_node, nics_per_node, links[0].rate, links[1].rate, links[2].rate"
    assert f"monta new: to fill in: {expected}\n" in capsys.readouterr().err
    with pytest.raises(ValueError) as error:
        load_cluster("cluster.yaml")
    assert str(error.value) == f"cluster.yaml: {expected}: missing, must be given"
    text = Path("cluster.yaml").read_text()
    assert "Not found: a GPU" in text and "Not found: a network interface" in text
    for key, value in (("ranks_per_node", "8"), ("nics_per_node", "8"), ("rate", "100 GB/s")):
        text = text.replace(f"#{key}:  # TO FILL IN", f"{key}: {value}")
    Path("cluster.yaml").write_text(text)
    assert load_cluster("cluster.yaml").num_ranks == 32


def test_a_model_of_no_sizes_names_them() -> None:
    new("model --num-experts 8 --out model.yaml")
    with pytest.raises(ValueError, match=r"^model.yaml: hidden_size, num_layers, .* missing, "):
        load_model("model.yaml")


def test_printed_or_written_once(capsys: pytest.CaptureFixture[str]) -> None:
    new(f"model {SIZES}")
    printed = capsys.readouterr()
    new(f"model {SIZES} --out model.yaml --json")
    written = capsys.readouterr()
    document = json.loads(written.out)
    assert document["text"] == printed.out == Path("model.yaml").read_text()
    assert (document["file"], document["to_fill_in"]) == ("model.yaml", [])
    assert document["remarks"]["num_moe_layers"] == "taken: experts in every layer"
    assert main(["new", "model", "--out", "model.yaml"]) == 2
    assert "--out: got model.yaml, must not exist; --force" in capsys.readouterr().err
    new(f"model {SIZES} --out model.yaml --force")


def test_a_run_names_its_files_from_its_folder(tmp_path: Path) -> None:
    folder = config("mixtral_8x7b", tmp_path)
    Path("runs").mkdir()
    new(f"run --model {folder} --cluster h100_8x_ndr --nodes 2 --out runs/mine.yaml")
    run = strict_yaml.load(RunConfig, "runs/mine.yaml")
    assert (run.model, run.cluster) == ("../../mixtral_8x7b", "h100_8x_ndr")
    assert (run.name, run.layout.ep, run.megatron["num-layers"]) == ("mixtral_46_7b", 8, 32)


@pytest.mark.parametrize(
    ("words", "dtype", "router"),
    [
        ("", "bf16", True),
        ("--dtype float16", "fp16", True),
        ("--dtype float32", None, True),
        ("--probs-dtype bf16", "bf16", False),
    ],
)
def test_a_run_has_the_dtypes_of_its_model(words: str, dtype: str | None, router: bool) -> None:
    new(f"model --from mixtral_8x7b {words} --out model.yaml")
    new(
        "run --model model.yaml --cluster h100_8x_ndr --nodes 2 --ep 8 --ignore-memory --out r.yaml"
    )
    megatron = strict_yaml.load(RunConfig, "r.yaml").megatron
    assert [name for name in ("bf16", "fp16") if name in megatron] == ([dtype] if dtype else [])
    assert (megatron.get("moe-router-dtype") == "fp32") == router
    assert ("moe-router-dtype is left out" in Path("r.yaml").read_text()) == (not router)


@pytest.mark.parametrize("source", ["preset", "config.json"])
@pytest.mark.parametrize("name", sorted(CONFIGS.keys() - NO_PRESET))
def test_a_run_is_the_model(name: str, source: str, tmp_path: Path) -> None:
    model = name if source == "preset" else config(name, tmp_path)
    new(
        f"run --model {model} --cluster h100_8x_ndr --nodes 4 --ep 8 --tp 1 --ignore-memory --out r"
    )
    given = strict_yaml.load(RunConfig, "r").megatron
    file = presets.find("runs", name)
    text = file.read_text().partition("  # Model\n")[2].partition("  # Exchange")[0]
    names = [*re.findall(r"^  ([\w-]+):", text, re.MULTILINE), "vocab-size"]
    published = strict_yaml.load(RunConfig, file).megatron
    allowed = NOT_IN_THE_RUN + (() if source == "preset" else OF_THE_TRAINING)
    sections = Path("r").read_text()
    theirs = {key: published[key] for key in names if key not in allowed}
    written = re.findall(r"^  ([\w-]+):", _model_part(sections), re.MULTILINE)
    ours = {key: given[key] for key in [*written, "vocab-size"] if key not in allowed}
    assert ours == theirs


def _model_part(text: str) -> str:
    part = text.partition("\nmegatron:\n")[2]
    experts = part.partition("Experts, common choices.")[0]
    return experts


@pytest.mark.parametrize("name", sorted(NO_PRESET))
def test_a_config_becomes_a_run_that_starts(name: str, tmp_path: Path) -> None:
    model = config(name, tmp_path)
    ep = math.gcd(64, load_model(model).num_experts)
    job = f"--model {model} --cluster h100_8x_ndr --tp 1 --ep {ep} --etp 1 --pp 1"
    new(f"run {job} --nodes 16 --ignore-memory --out r")
    for words in (
        f"plan {job} --world-size 128",
        "estimate --config r",
        "launch --config r",
    ):
        dry = ["--dry-run"] if words.startswith("launch") else []
        assert main([*words.split(), "--ignore-memory", *dry]) == 0


def test_presets_ask_slurm_for_what_a_new_run_asks_for() -> None:
    new("run --model mixtral_8x7b --cluster h100_8x_ndr --nodes 2 --out r")
    asked = strict_yaml.load(RunConfig, "r").slurm
    assert asked.options == {"gpus-per-node": 8, "exclusive": True, "mem": 0}
    files = presets.find("runs", "dbrx").parent.glob("*.yaml")
    on_gpus = [file for file in files if file.stem != "quickstart"]
    assert len(on_gpus) == 10
    for file in on_gpus:
        assert strict_yaml.load(RunConfig, file).slurm == asked, file.stem


def test_a_run_of_sizes_alone_is_a_choice() -> None:
    new(f"model {SIZES} --num-moe-layers 23 --out model.yaml")
    new("run --model model.yaml --cluster h100_8x_ndr --nodes 8 --ep 8 --ignore-memory --out r")
    text = Path("r").read_text()
    choices = text.partition("Experts, common choices.")[2]
    assert "# taken: dense layers first\n  moe-layer-freq: ([0]*1+[1]*23)\n" in choices
    assert "which layers are dense" in " ".join(text.replace("#", "").split())


def test_a_run_names_the_parts_it_does_not_express(capsys: pytest.CaptureFixture[str]) -> None:
    new("run --model dbrx --cluster h100_8x_ndr --nodes 8 --ep 8 --ignore-memory --out r")
    line = "not expressed by Megatron's arguments: clip_qkv (queries, keys and values are not "
    assert f"monta new: {line}clipped)\n" in capsys.readouterr().err
    assert line in " ".join(Path("r").read_text().replace("#", "").split())


def test_gpus_of_nvidia_smi(tmp_path: Path) -> None:
    assert hardware.find_gpus() is None
    program = tmp_path / "nvidia-smi"
    rows = [*["NVIDIA H200, 143771"] * 7, "NVIDIA A2, 15356"]
    program.write_text("#!/bin/sh\n" + "".join(f"echo '{row}'\n" for row in rows))
    program.chmod(0o755)
    assert hardware.find_gpus() == Gpus(model="H200", number=7, memory_gb=150.8)
    program.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed, no driver'\nexit 9\n")
    assert hardware.find_gpus() is None
    program.write_text("#!/bin/sh\necho 'NVIDIA GB10, [N/A]'\n")
    assert hardware.find_gpus() == Gpus(model="GB10", number=1, memory_gb=None)


def test_interfaces_of_sys(tmp_path: Path) -> None:
    sys = tmp_path / "sys"

    def write(name: str, text: str) -> None:
        (sys / name).parent.mkdir(parents=True, exist_ok=True)
        (sys / name).write_text(text + "\n")

    assert hardware.find_interfaces(sys) is None
    # Of four cards one is software, one is down and one does not tell its speed.
    for name, state, speed in (("eth0", "up", 25000), ("lo", "up", 10), ("eth1", "down", 25000)):
        write(f"class/net/{name}/operstate", state)
        write(f"class/net/{name}/speed", str(speed))
    write("class/net/eth2/operstate", "up")
    write("class/net/eth2/speed", "-1")
    for name in ("eth0", "eth1", "eth2"):
        (sys / "class" / "net" / name / "device").mkdir()
    assert hardware.find_interfaces(sys) == Interfaces(
        names=("eth0",), gbit_per_s=25.0, source="/sys/class/net", others=0, network="Ethernet"
    )
    # Ports of InfiniBand come before them.
    for number, rate, state in ((0, 400, "4: ACTIVE"), (1, 400, "4: ACTIVE"), (2, 400, "1: DOWN")):
        write(f"class/infiniband/mlx5_{number}/ports/1/rate", f"{rate} Gb/sec (4X NDR)")
        write(f"class/infiniband/mlx5_{number}/ports/1/state", state)
    write("class/infiniband/mlx5_9/ports/1/rate", "100 Gb/sec (4X EDR)")
    write("class/infiniband/mlx5_9/ports/1/state", "4: ACTIVE")
    names = ("mlx5_0:1", "mlx5_1:1")
    assert hardware.find_interfaces(sys) == Interfaces(
        names=names,
        gbit_per_s=400.0,
        source="/sys/class/infiniband",
        others=1,
        network="InfiniBand",
    )


@pytest.mark.parametrize(
    ("words", "notes"),
    [
        ("--ranks-per-node 8", ["a GPU", "a network", "How many"]),
        ("--gpu H100 --num-nodes 4", ["a network"]),
        ("--gpu H100 --num-nodes 1", []),
        (f"--gpu H100 --num-nodes 4 {EIGHT}", []),
        (f"--num-nodes 4 {EIGHT} --node-link-rate 300GB/s --memory-rate 2TB/s", ["a GPU"]),
    ],
)
def test_what_is_given_was_not_looked_for_in_vain(
    words: str, notes: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    new(f"cluster {words}")
    text = capsys.readouterr().out
    assert re.findall(r"Not found: (a \w+)|(How many) nodes", text) == [
        ("", note) if note == "How many" else (note, "") for note in notes
    ]
