"""Bad input to any sub-command: exit status 2, one line that says what is wrong, nothing written.

Each case runs as a process of its own, forked from one that has imported what takes long.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from preloaded import Preloaded

from monta_megatron.cli import main

CONFIGS = Path(__file__).parents[2] / "configs"
MODEL, CLUSTER = (
    CONFIGS / "models" / "mixtral_8x7b.yaml",
    CONFIGS / "clusters" / "a800_2x8_ib200.yaml",
)
LAUNCH = f"launch --config {CONFIGS / 'runs' / 'quickstart.yaml'} --dry-run"
RUN = CONFIGS / "runs" / "mixtral_8x7b.yaml"
PLAN = f"plan --model {MODEL} --cluster {CLUSTER}"
CONFIG = f"plan --cluster {CLUSTER} --model {Path(__file__).parent}/bad_configs"
BENCH = "bench --experts 8 --top-k 2 --hidden 32 --tokens 16"
SIMULATE = f"simulate --model {MODEL} --cluster {CLUSTER} --ep 8"
CALIBRATE = "calibrate --out c.yaml"
EMULATE = "emulate --nodes 2 --ranks-per-node 2 --inter-mbit 500"
NEW_CLUSTER = "new cluster --gpu H100 --num-nodes 2 --ranks-per-node 8 --nics-per-node 8"
NEW_RUN = "new run --model dbrx --cluster h100_8x_ndr"

# What is typed, and words of the line that answers it: where, what was given, what is allowed.
CASES = [
    # A flag of another tool, before what is missing: the one of the same meaning.
    ("plan --gpus 8", ["unrecognized arguments: --gpus", "did you mean --world-size?"]),
    ("plan --num-nodes 2", ["unrecognized", "did you mean --nodes?"]),
    ("plan --topk 2", ["unrecognized arguments: --topk"]),
    ("plan --World_Size 8", ["unrecognized", "did you mean --world-size?"]),
    ("launch --recipe r.yaml", ["unrecognized", "did you mean --config?"]),
    ("emulate --nnodes 2", ["unrecognized", "did you mean --nodes?"]),
    ("new cluster --ib-rate 200G", ["unrecognized", "did you mean --network-rate?"]),
    # No abbreviations, and one size of a job.
    (f"{PLAN} --micro 1", ["unrecognized", "--micro-batch-size"]),
    (f"{PLAN} --nodes 1 --world-size 16", ["--world-size: got 16, must be 8, the ranks of"]),
    (f"{PLAN} --ranks-per-node 4", ["--ranks-per-node: got 4, must be with --nodes"]),
    (f"{PLAN} --tokens 4kk", ["--tokens", "'4kk'", "4k for 4096"]),
    (f"{PLAN} --chain alltoall", ["--chain: got alltoall", "must be with a layout"]),
    (f"{PLAN} --ep 8 --chain fast", ["--chain", "'fast'", "one of"]),
    (f"{PLAN} --ep 8 --num-chunks 2", ["--num-chunks: got 2, must be with --chain"]),
    ("estimate --model mixtral_8x7b", ["--cluster: not given, must be with --model"]),
    ("estimate dbrx --model dbrx", ["--model: got dbrx, must be left out with a run file"]),
    ("launch dbrx --config dbrx", ["--config: got dbrx and dbrx"]),
    ("", ["COMMAND", "required"]),
    ("plann", ["'plann'", "plan", "did you mean plan?"]),
    ("sim", ["'sim'", "did you mean simulate?"]),
    (f"{PLAN} --tokens-per-rank 8", ["unrecognized", "did you mean --tokens?"]),
    (f"{PLAN} -ep 8", ["unrecognized", "did you mean --ep?"]),
    (f"{PLAN} --inter-rate-raito=2", ["unrecognized", "did you mean --inter-rate-ratio?"]),
    ("plan", ["--model", "--cluster", "required"]),
    (f"plan --model nowhere.yaml --cluster {CLUSTER}", ["nowhere.yaml", "No such file"]),
    (f"plan --model . --cluster {CLUSTER}", [".: cannot be read", "without config.json"]),
    (f"plan --model {MODEL} --cluster .", [".: cannot be read: is a folder"]),
    (f"{CONFIG}/llama.json", ["model_type: got llama, has no experts", "monta new model"]),
    (f"{CONFIG}/no_model_type.json", ["model_type: missing, must be the name of a family"]),
    (
        f"{CONFIG}/missing.json",
        [
            "num_key_value_heads, num_local_experts, num_experts_per_tok, intermediate_size: "
            "missing, must be given"
        ],
    ),
    (f"{CONFIG}/wrong_type.json", ["num_experts_per_tok: got '8', must be an integer >= 1"]),
    (f"{CONFIG}/too_many.json", ["num_experts_per_tok: got 9, must be at most num_experts"]),
    (f"{CONFIG}/many_experts.json", ["num_experts: got 100000000, must be at most 65536"]),
    (
        f"{CONFIG}/dense.json",
        ["dense.json: first_k_dense_replace: got 5, must leave a layer", "num_hidden_layers (3)"],
    ),
    (f"{CONFIG}/list.json", ["must be a mapping"]),
    (f"{CONFIG}/cut_short.json", ["is no JSON in line 2"]),
    (f"{CONFIG}/twice.json", ["key 'hidden_size' is written twice"]),
    (f"{CONFIG}/nested.json", ["ffn_config: got 16, must be a mapping with the keys"]),
    (f"plan --model {CLUSTER} --cluster {CLUSTER}", ["a800_2x8_ib200.yaml", "unknown key"]),
    (f"plan --model {MODEL} --cluster {MODEL}", ["mixtral_8x7b.yaml", "unknown key"]),
    (f"{PLAN} --ep 3", ["layout", "got 16", "multiple of etp * ep * pp (3)"]),
    (f"{PLAN} --tp 0", ["--tp", "'0'", ">= 1"]),
    (f"{PLAN} --etp 2.5", ["--etp", "'2.5'", ">= 1"]),
    (f"{PLAN} --world-size 5000", ["--world-size", "5000", "at most the 16 ranks"]),
    (f"{PLAN} --world-size 1", ["world_size", "got 1", "more ranks"]),
    (f"{PLAN} --seq-length 0", ["--seq-length", "'0'", ">= 1"]),
    (f"{PLAN} --ep 8 --tp 8 --seq-length 4100", ["tp: got 8, must divide seq_length", "4100"]),
    (f"{PLAN} --micro-batch-size 1.5", ["--micro-batch-size", "'1.5'", ">= 1"]),
    (f"{PLAN} --tokens -1", ["--tokens", "'-1'", ">= 0"]),
    (f"{PLAN} --ep 8 --routing diagonal", ["--routing", "'diagonal'", "uniform", "folder"]),
    (f"{PLAN} --ep 8 --tp 1 --routing node-limited", ["--routing", "node-limited"]),
    (f"{PLAN} --routing node-limited", ["--routing", "node-limited", "beside a layout"]),
    (f"{PLAN} --memory-limit-gb 0.000001", ["world_size", "no (tp, ep, etp) fits"]),
    (f"{PLAN} --phase forwards", ["--phase", "'forwards'", "did you mean forward?"]),
    (f"{PLAN} --ep 8 --routing {CONFIGS}", ["configs", "no router_trace_rank*.jsonl", "folder"]),
    (f"{PLAN} --phase backward", ["--phase", "'backward'", "forward"]),
    (f"{PLAN} --inter-rate-ratio 0", ["--inter-rate-ratio", "'0'", "> 0"]),
    (f"{PLAN} --ep 8 --memory-limit-gb 0.000001", ["memory_limit", "must be at least"]),
    (f"{PLAN} --margin 2", ["--margin", "'2'", "from 0 to 1"]),
    (f"{PLAN} --ep 8 --overlapped-compute-us -1", ["--overlapped-compute-us", "'-1'", ">= 0"]),
    (
        f"{PLAN} --overlapped-compute-us 100",
        ["--overlapped-compute-us", "got 100", "with a layout"],
    ),
    (f"{PLAN} --layout nowhere.yaml", ["nowhere.yaml", "No such file"]),
    (f"{PLAN} --ep 8 --out nowhere/plan.yaml", ["nowhere/plan.yaml", "cannot be written"]),
    (f"{PLAN} --ep 8 --out .", [".: ", "cannot be written"]),
    (f"{PLAN} --ep 8 --out {MODEL}", ["--out", "mixtral", "must not exist", "--force"]),
    (f"{PLAN} --ep 4", ["layout: needs", "at most 80 GB", "memory_gb_per_rank", "--ignore-memory"]),
    (f"{PLAN} --ep 4 --out plan.yaml", ["layout: needs", "at most 80 GB"]),
    (f"{PLAN} --experts 8", ["unrecognized", "--experts"]),
    ("bench", ["--experts", "not given"]),
    (f"{BENCH} --experts many", ["--experts", "'many'", ">= 1"]),
    (f"{BENCH} --top-k 9", ["--top-k", "got 9", "at most --experts (8)"]),
    (f"{BENCH} --chains fastest", ["--chains", "'fastest'", "alltoall_dedup"]),
    (f"{BENCH} --num-chunks 1,,2", ["--num-chunks", "'1,,2'", "list"]),
    (f"{BENCH} --dtype int8", ["--dtype", "'int8'", "bfloat16"]),
    (f"{BENCH} --ep 3", ["--ep", "got 3", "divides the 4 ranks"]),
    (f"{BENCH} --repeats 0", ["--repeats", "'0'", ">= 1"]),
    (f"{BENCH} --tune-steps -1", ["--tune-steps", "'-1'", ">= 0"]),
    (f"{BENCH} --chains alltoall --tune-steps 5", ["--tune-steps", "got 5", "--chains auto"]),
    (f"{BENCH} --calibrate-seconds x", ["--calibrate-seconds", "'x'", ">= 0"]),
    (f"{BENCH} --calibrate-seconds 5 --chains alltoall", ["got 5", "--chains auto"]),
    (f"{BENCH} --calibrate-seconds 5 --cluster h100_8x_ndr", ["got 5", "with --cluster"]),
    (f"{BENCH} --overlap-experts", ["--overlap-experts", "with --layer"]),
    (f"{BENCH} --expert-ms 5", ["--expert-ms", "with --layer"]),
    (f"{BENCH} --layer --expert-ms 0", ["--expert-ms", "'0'", "> 0"]),
    (f"{BENCH} --layer --overlap-experts --chains alltoall", ["--overlap-experts", "are tokens"]),
    (f"{BENCH} --routing even", ["--routing", "'even'", "uniform", "folder"]),
    (f"{BENCH} --routing {CONFIGS}", ["configs", "no router_trace_rank*.jsonl", "folder"]),
    (f"{BENCH} --routing W8", ["--routing", "'W8'", "W7"]),
    (f"{BENCH} --top-k 5 --routing W5", ["--routing", "got W5", "upper half holds 4"]),
    (f"{PLAN} --ep 8 --routing W9_none", ["--routing", "'W9_none'", "W7"]),
    (f"{BENCH} --num-chunk-count 2", ["monta bench", "did you mean --num-chunks?"]),
    (f"{BENCH} --cluster nowhere.yaml", ["nowhere.yaml", "No such file"]),
    ("place", ["--trace", "--apply", "required"]),
    (f"place --trace {CONFIGS}", ["--model", "must be with --trace"]),
    (f"place --trace {CONFIGS} --apply {CONFIGS}", ["--apply", "not allowed with", "--trace"]),
    (f"place --apply {CONFIGS} --placement {MODEL} --replace", ["mixtral", "is no JSON"]),
    ("calibrate", ["--out", "not given"]),
    ("calibrate --out nowhere/c.yaml", ["--out", "nowhere/c.yaml", "folder that exists"]),
    (f"{CALIBRATE} --budget-seconds nan", ["--budget-seconds", "'nan'", "> 0"]),
    (f"{CALIBRATE} --plot {MODEL}", ["--plot", "mixtral", "cannot be made"]),
    (f"{CALIBRATE} --nics-per-node 0", ["--nics-per-node", "'0'", ">= 1"]),
    (f"{CALIBRATE} --budget-second=s", ["unrecognized", "did you mean --budget-seconds?"]),
    (f"{CALIBRATE} --seconds 10", ["unrecognized", "--seconds"]),
    (f"{CALIBRATE} --name a\x1b[2J", ["--name", r"'a\x1b[2J'", "printable"]),
    ("emulate", ["--ranks-per-node", "required"]),
    (f"{EMULATE} --nic-per noed -- x.py", ["--nic-per", "'noed'", "did you mean node?"]),
    (f"{EMULATE} --nodes 1 -- x.py", ["--nodes", "got 1", "from 2"]),
    (f"{EMULATE} --inter-mbit 0 -- x.py", ["--inter-mbit", "got 0", "from 1"]),
    (EMULATE, ["CMD", "missing", "-m MODULE"]),
    (f"{EMULATE} -- nowhere.py", ["CMD", "'nowhere.py'", "exists"]),
    (f"{EMULATE} -- -m nowhere", ["CMD", "-m nowhere", "finds"]),
    (f"{EMULATE} -- monta bench --experts none", ["--experts", "'none'", ">= 1"]),
    (f"{EMULATE} -- monta benhc", ["'benhc'", "did you mean bench?"]),
    (f"{EMULATE} -m monta_megatron bench", ["CMD", "`--` is missing"]),
    ("emulate --nodes 250 --ranks-per-node 250 --inter-mbit 500 -- monta doctor", ["open files"]),
    ("new", ["KIND", "required"]),
    ("new modle", ["'modle'", "did you mean model?"]),
    ("new model --from nowhere.json", ["nowhere.json", "No such file"]),
    (f"new model --from {CONFIGS}", ["configs: cannot be read", "without config.json"]),
    ("new model --hidden-size 0", ["--hidden-size", "'0'", ">= 1"]),
    ("new model --dtype int8", ["--dtype", "'int8'", "bf16"]),
    (
        "new model --from dbrx --moe-router-topk 17",
        ["monta new: --moe-router-topk: got 17, must be at most num_experts (16)"],
    ),
    ("new model --from dbrx --num-experts 3", ["monta new: moe_router_topk: got 4", "(3)"]),
    (f"new model --out {MODEL}", ["--out", "mixtral", "must not exist", "--force"]),
    ("new model --from dbrx --out nowhere/m.yaml", ["nowhere/m.yaml", "cannot be written"]),
    ("new cluster --gpu H99", ["--gpu", "'H99'", "H100"]),
    ("new cluster --network-rate 400", ["--network-rate", "'400'", "a rate with its unit"]),
    (
        f"{NEW_CLUSTER} --network-rate-reached 200GB/s",
        [
            "--network-rate-reached: the network has 200 GB/s (1,600 Gb/s) for each interface",
            "bits",
        ],
    ),
    (
        f"{NEW_CLUSTER} --network-rate 200GBps",
        ["--network-rate", "'200GBps'", "a rate with its unit"],
    ),
    (
        f"{NEW_CLUSTER} --node-link-rate 900G",
        ["--node-link-rate", "'900G'", "a rate with its unit"],
    ),
    (
        f"{NEW_CLUSTER} --network-rate 200G --network-rate-reached 200G",
        ["--network-rate: got 200G, must be left out with --network-rate-reached"],
    ),
    (
        "new cluster --gpu H100 --num-nodes 1 --ranks-per-node 8 --network-rate 400Gb/s",
        ["monta new: --network-rate: got 50 GB/s, must be left out where num_nodes is 1"],
    ),
    ("new run --model dbrx --cluster h100_8x_ndr", ["--nodes", "--world-size"]),
    (f"{NEW_RUN} --nodes 600", ["--nodes", "got 600", "at most 512"]),
    (f"{NEW_RUN} --nodes 8 --ep 3", ["layout", "multiple of etp * ep * pp (3)"]),
    (f"{NEW_RUN} --nodes 1", ["no (tp, ep, etp) fits DBRX"]),
    (
        f"{NEW_RUN} --nodes 8 --pp 2 --ep 8 --name a/b",
        ["new: --name: got 'a/b'", "letters, digits"],
    ),
    (
        "new run --model deepseek_v3 --cluster h100_8x_ndr --nodes 8 --pp 2 --ep 8 --ignore-memory",
        ["--pp: got 2, must divide num_layers (61)", "decoder-last-pipeline-num-layers"],
    ),
    ("launch", ["--config: not given", "must be a file"]),
    ("launch --config nowhere.yaml", ["nowhere.yaml", "No such file"]),
    (f"launch --config {RUN} --start sbach", ["--start", "'sbach'", "did you mean sbatch?"]),
    (
        f"launch --config {RUN} --start none -- --moe-monta-plan {MODEL}",
        ["mixtral_8x7b.yaml", "unknown key"],
    ),
    (f"launch --config {RUN} -- --moe-monta-plan nowhere.yaml", ["nowhere.yaml", "No such file"]),
    (f"{LAUNCH} -- --moe-monta-calibrate-seconds=-1", ["calibrate", "got -1.0", ">= 0"]),
    (f"{LAUNCH} -- --moe-monta-tune-steps few", ["tune-steps", "got 'few'", ">= 0"]),
    (f"{LAUNCH} -- --moe-monta-plan-out no/p.yaml", ["plan-out", "'no/p.yaml'", "without tuning"]),
    (f"launch --config {MODEL}", ["mixtral_8x7b.yaml", "unknown key"]),
    (f"launch --config {MODEL} --start here", ["--start", "'here'", "torchrun"]),
    ("report", ["--out", "required"]),
    ("report --out page.html --recording nowhere", ["nowhere", "No such file", "monta timeline"]),
    ("compare", ["--config: not given", "must be a file"]),
    ("compare --config nowhere.yaml", ["nowhere.yaml", "No such file"]),
    (f"compare --config {RUN} --iterations 2", ["--iterations", "2", ">= 3"]),
    (f"compare --config {RUN} --pairs 0", ["--pairs", "0", ">= 1"]),
    (f"compare --config {RUN} --start sbatch", ["--start", "'sbatch'", "srun"]),
    (
        f"compare --config {RUN} -- --moe-token-dispatcher-type flex",
        ["--moe-token-dispatcher-type", "must be left out"],
    ),
    ("estimate", ["--config: not given", "must be a file"]),
    ("estimate --config nowhere.yaml", ["nowhere.yaml", "No such file"]),
    (f"estimate --config {RUN} --mfu 2", ["--mfu", "got 2", "at most 1"]),
    (f"estimate --config {RUN} --gpu V100", ["--gpu", "V100", "H100"]),
    (f"estimate --config {RUN} --set mfu", ["--set", "'mfu'", "NAME=VALUE"]),
    (f"estimate --config {RUN} --set overlap=1", ["--set", "overlap", "overlap_share"]),
    (f"estimate --config {RUN} --set overlap_share=2", ["--set overlap_share", "2", "at most 1"]),
    (f"estimate --config {RUN} --tp 3", ["mixtral_8x7b.yaml: layout.", "tp * cp * pp (6)"]),
    (f"estimate --config {RUN} --pp 64 --world-size 64 --ep 1", ["layout.pp", "num_layers"]),
    (
        f"estimate --config {RUN} --world-size 8000 --global-batch-size 8000",
        ["--world-size", "8000", "at most the 4096 ranks"],
    ),
    (f"estimate --config {RUN} --global-batch-size 3", ["global_batch_size: got 3", "multiple"]),
    (f"estimate --config {RUN} --cluster nowhere", ["nowhere", "nor a preset"]),
    (f"estimate --config {RUN} -- --num-layers 0", ["num-layers", "0"]),
    (f"estimate --config {CONFIGS / 'runs' / 'quickstart.yaml'}", ["--gpu: not given", "H100"]),
    ("validate --json", ["is a script now", "python benchmarks/validate.py"]),
    ("timeline", ["RECORDING", "--model", "--record", "none given"]),
    ("timeline nowhere.json", ["nowhere.json", "No such file"]),
    (f"timeline {MODEL}", ["mixtral_8x7b.yaml"]),
    (f"timeline --model {MODEL}", ["--cluster", "not given"]),
    (f"timeline nowhere.json --model {MODEL}", ["--model", "left out"]),
    (f"timeline --model {MODEL} --cluster {CLUSTER} --max-ranks 0", ["--max-ranks", "'0'"]),
    (f"simulate --model {MODEL} --cluster {CLUSTER}", ["--sweep", "required"]),
    (f"{SIMULATE} --sweep speed=1,2", ["--sweep", "speed", "tokens"]),
    (f"{SIMULATE} --sweep tokens=0", ["--sweep", "'0'", ">= 1"]),
    (f"{SIMULATE} --sweep tokens", ["--sweep", "'tokens'"]),
    (f"{SIMULATE} --sweep top-k=9", ["top", "9", "8"]),
    (f"{SIMULATE} --sweep tokens=9999,99999", ["tokens 9,999", "needs", "at most 80 GB"]),
    (f"{SIMULATE} --sweep ranks=4", ["--sweep: ranks 4", "needs", "at most 80 GB"]),
    (f"timeline --model {MODEL} --cluster {CLUSTER} --ep 4", ["needs", "at most 80 GB"]),
    ("timeline nowhere.json --ignore-memory", ["--ignore-memory", "left out with RECORDING"]),
    (f"{SIMULATE} --sweep top-k=1,2 --routing .", ["--sweep", "top-k", "trace ."]),
    (f"{SIMULATE} --sweep tokens=1,2 --plot {MODEL}", ["--plot", "mixtral", "cannot be made"]),
    ("doctor --fix", ["unrecognized", "--fix"]),
]

IMPORTED_ONCE = (
    "tools.bench.settings",
    "planner.plan",
    "tools.plan.layout_ranking",
    "tools.calibrate.run",
)

Monta = Callable[[Path, str], tuple[int, str, str]]


def short(words: str) -> str:
    """A command line without the files that most of them name."""
    return words.replace(f" --model {MODEL} --cluster {CLUSTER}", "").replace(f"{CONFIGS}/", "")


def monta_on_a_rank(folder: Path, words: list[str]) -> None:
    """One of 4 ranks, for the commands that a launcher starts."""
    os.chdir(folder)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
    sys.argv[1:] = words
    sys.exit(main())


@pytest.fixture(scope="module")
def monta() -> Iterator[Monta]:
    """Runs one command line in a folder: exit status, standard output, standard error."""
    process = Preloaded("torch", *(f"monta_megatron.{name}" for name in IMPORTED_ONCE))

    def run(folder: Path, words: str) -> tuple[int, str, str]:
        result = process.run(monta_on_a_rank, folder, words.split())
        return result.returncode, result.stdout, result.stderr

    yield run
    process.close()


@pytest.mark.parametrize(("words", "expected"), CASES, ids=[short(words) for words, _ in CASES])
def test_one_line_and_status_2(
    monta: Monta, tmp_path: Path, words: str, expected: list[str]
) -> None:
    status, stdout, stderr = monta(tmp_path, words)
    assert (status, stdout) == (2, ""), stderr
    (line,) = stderr.splitlines()
    assert line.startswith("monta"), line
    for word in expected:
        assert word in line, line
    assert list(tmp_path.iterdir()) == []


def test_good_input_passes_the_same_way(monta: Monta, tmp_path: Path) -> None:
    status, stdout, stderr = monta(tmp_path, f"{PLAN} --ep 8 --json")
    assert (status, stderr) == (0, "")
    assert json.loads(stdout)["key"]["ep"] == 8


def test_every_command_is_tried() -> None:
    from monta_megatron.cli import build_parser, sub_parsers

    tried = [words.split()[0] for words, _ in CASES if words]
    assert {name.split()[0] for name in sub_parsers(build_parser())} <= set(tried)
    assert len(CASES) >= 30
