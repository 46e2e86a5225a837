#!/usr/bin/env python
"""The parts of `scripts/gpu_check.sh` that are Python; each ends with a line "proven: ...".

    gpu_check.py versions              what is installed, and what a container may lack
    gpu_check.py bits                  each Triton kernel against PyTorch's operations
    gpu_check.py record FILE           the messages of one of 16 CPU ranks
    gpu_check.py replay FILE           that rank on the GPU, with stand-ins for its collectives
    gpu_check.py host FILE             host and device time of each pass
    gpu_check.py times                 the kernels' times, beside a copy's
    torchrun ... gpu_check.py gloo     all chains against stock over Gloo, through the host
    torchrun ... gpu_check.py bench    all chains against stock over NCCL, by `monta bench`

--short: fewer cases. Exit status 3: nothing was proven, and the last line says why.
"""

import argparse
import functools
import os
import shutil
import sys
import sysconfig
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

# Cases of models' rows; most build kernels of their own.
HIDDEN_SIZES = (4096, 7168, 1000)
NUM_KERNEL_CASES = 24
NUM_TOKENS, NUM_EXPERTS, NUM_RANKS = 4096, 64, 8
REPEATS, WARM_UP = 20, 3
# More than any GPU's L2 cache holds.
FLUSHED_BYTES = 512 * 2**20
# Files in which the host must not wait for the device, but for the counts, by an event.
PASSES = "monta_megatron/exchange/"
FEW = ("--experts", "32", "--top-k", "4", "--hidden", "1024", "--tokens", "512")
BENCH = (*FEW, "--dtype", "bf16", "--repeats", "1")


def versions(short: bool, arguments: Sequence[str]) -> int:
    """Print what `monta doctor` says, and what Triton needs to build a kernel."""
    from monta_megatron.cli import main
    from monta_megatron.exchange.kernels import kernel_problem

    main(["doctor"])
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    print(f"C compiler: {shutil.which('gcc') or shutil.which('cc') or 'none'}")
    print(f"Python.h: {header if header.is_file() else 'none'}")
    if torch.cuda.is_available() and (problem := kernel_problem("cuda")):
        print(problem)
        return 1
    return _proven("versions are named above")


def bits(short: bool, arguments: Sequence[str]) -> int:
    """Compare each kernel with PyTorch's operations."""
    import kernel_cases

    drawn = map(kernel_cases.case_of, range(1000))
    seeds = [
        case.seed
        for case in drawn
        if case.num_rows > 2 and case.hidden_size in HIDDEN_SIZES and case.dtype != torch.float64
    ][: 4 if short else NUM_KERNEL_CASES]
    differing = 0
    for seed in seeds:
        try:
            kernel_cases.check(seed, seed + 1, "cuda")
        except AssertionError as error:
            print(error)
            differing += 1
    print(f"{differing} of {len(seeds)} random cases differ")
    return 1 if differing else _proven("Triton kernels give the bits of PyTorch's operations")


def record(short: bool, arguments: Sequence[str]) -> int:
    """Record the cases, by CPU ranks."""
    import replay

    cases, path = _cases(short), Path(arguments[0])
    replay.record(cases, path)
    megabytes = path.stat().st_size / 1e6
    return _proven(f"16 CPU ranks ran {len(cases)} cases; their record has {megabytes:.1f} MB")


def replayed(short: bool, arguments: Sequence[str]) -> int:
    """Replay the cases on the GPU, then see whether planted faults are found."""
    import replay

    device, lines = torch.device("cuda", 0), []
    cases, records = _cases(short), replay.read_records(Path(arguments[0]))
    kinds = (False, True)
    for fused in kinds:
        for seed, (case, recorded) in enumerate(zip(cases, records, strict=True)):
            lines += _replay(case, recorded, device, fused, seed)
    print(*lines, sep="\n", end="\n" * bool(lines))
    found = []
    faulty = max(range(len(cases)), key=lambda at: _num_collectives(cases[at], records[at]))
    for name, fault in replay.FAULTS.items():
        if name is not None:
            with fault():
                found.append(bool(_replay(cases[faulty], records[faulty], device, False, 0)))
            print(f"planted in {cases[faulty]}: {name}: {'found' if found[-1] else 'not found'}")
    if lines:
        return 1
    queues = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "not set")
    return _proven(
        f"{len(cases)} cases in both kinds of kernels give the CPU ranks' bits with stand-ins for "
        f"collectives, CUDA_DEVICE_MAX_CONNECTIONS {queues}; {sum(found)} of {len(found)} planted "
        "faults seen"
    )


def host(short: bool, arguments: Sequence[str]) -> int:
    """Time each pass on the host and on the device, with stand-ins for collectives."""
    import device_times
    import replay

    device, repeats = torch.device("cuda", 0), WARM_UP if short else REPEATS
    records = replay.read_records(Path(arguments[0]))
    measured = device_times.pass_times(_cases(short), records, device, repeats)
    print(f"{'chain, kernels, pass':56} host us  device us")
    for name, (host_us, device_us) in measured.items():
        print(f"{name:56} {host_us:7.1f} {device_us:10.1f}")
    return _proven("host times of the passes are above")


def _replay(case, recorded, device: torch.device, fused: bool, seed: int) -> list[str]:
    import replay

    made = replay.Replay(case, recorded, device=device, fused=fused, seed=seed)
    made.run()
    torch.cuda.synchronize()
    return [f"{'Triton' if fused else 'PyTorch'}: {line}" for line in made.differences()]


def _cases(short: bool) -> list:
    import replay

    cases = replay.replay_cases()
    return [case for case in cases if case.case.num_chunks != 2] if short else cases


def _num_collectives(case, recorded) -> int:
    """Of a case in which a wait that is missing may be seen."""
    return len(recorded.messages) * (not case.pipelined)


def times(short: bool, arguments: Sequence[str]) -> int:
    """Time the kernels, each with a cold cache and the host ahead, and what a launch takes."""
    import kernel_bytes

    device = torch.device("cuda", 0)
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device=device)
    repeats = WARM_UP if short else REPEATS
    print(f"{'':24} device us      GB/s   host us per call")
    shape = 2, NUM_TOKENS, kernel_bytes.HIDDEN_SIZE
    rows, into = torch.empty(shape, dtype=torch.bfloat16, device=device)
    copy = {"copy (PyTorch)": (lambda: into.copy_(rows), rows.nbytes + into.nbytes)}
    work = copy | kernel_bytes.work(device, NUM_TOKENS, NUM_EXPERTS, NUM_RANKS)
    for name, (do, num_bytes) in work.items():
        device_us, host_us = _median_us(do, flushed, repeats)
        gbytes_per_s = num_bytes / device_us / 1e3
        print(f"{name:24} {device_us:9.1f} {gbytes_per_s:9.0f} {host_us:9.1f}")
    return _proven("times of the kernels are above, beside a copy's")


def _median_us(
    do: Callable[[], object], flushed: torch.Tensor, repeats: int
) -> tuple[float, float]:
    """Device time and host time of a call, in us."""
    for _ in range(WARM_UP):
        do()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    host_us = []
    for begin, end in events:
        flushed.zero_()
        # The host is ahead: what it takes for the launches is over before they run.
        torch.cuda._sleep(1_000_000)
        begin.record()
        before = time.perf_counter()
        do()
        host_us.append((time.perf_counter() - before) * 1e6)
        end.record()
    torch.cuda.synchronize()
    return median(begin.elapsed_time(end) * 1e3 for begin, end in events), median(host_us)


def is_on_device(tensor: torch.Tensor) -> bool:
    """Whether a message goes through the host."""
    return tensor.is_cuda


def send_through_host() -> None:
    """Let processes that share one GPU exchange its tensors without NCCL, by Gloo.

    Called before Megatron is imported, which keeps some of torch's functions. The host waits for
    what the caller's stream was given when a collective starts and, in `wait`, for the copy of the
    result; so no order of streams is put to the test.
    """
    from monta_megatron.emulation import gloo_collectives as gloo

    exchange_on_host = gloo._exchange

    def exchange(outputs: Any, messages: Any, group: dist.ProcessGroup) -> Any:
        if not any(map(is_on_device, outputs)):
            return exchange_on_host(outputs, messages, group)
        received = [torch.empty(part.shape, dtype=part.dtype) for part in outputs]

        def copy_back() -> None:
            for peer in gloo._peers(group):
                outputs[peer].copy_(received[peer])

        sent = [(tensor.to("cpu", copy=True), peers) for tensor, peers in messages]
        return gloo.PendingWork([exchange_on_host(received, sent, group)], copy_back)

    def reduce_scatter_tensor(output: Any, input: Any, *, group: Any = None, **given: Any) -> Any:
        parts = input.view(gloo._given(group).size(), *output.shape).unbind()
        return gloo.reduce_scatter(output, list(parts), group=group, **given)

    gloo.install()
    gloo._exchange = exchange
    dist.reduce_scatter_tensor = reduce_scatter_tensor


def gloo(short: bool, arguments: Sequence[str]) -> int:
    """Run `monta bench` with real processes, which may share a GPU."""
    from monta_megatron.cli import main
    from monta_megatron.exchange import collectives

    send_through_host()
    collectives.join_launch = functools.partial(collectives.join_launch, transport="gloo")
    status = main(["bench", *BENCH, *arguments])
    return status or _proven(
        "all chains give stock's results with real processes, through the host; no order of streams"
    )


def bench(short: bool, arguments: Sequence[str]) -> int:
    """Run `monta bench`, and say where the exchange makes the host wait for the device.

    And whether NCCL tells of every collective that it has ended; see `exchange.errors`.
    """
    from monta_megatron.cli import main
    from monta_megatron.exchange.errors import device_time_limit

    places: dict[str, None] = {}

    def note(message: object, *_: object, **__: object) -> None:
        frames = [frame for frame in traceback.extract_stack() if PASSES in frame.filename]
        if "synchroniz" in str(message) and frames:
            places[f"{frames[-1].filename}:{frames[-1].lineno}"] = None

    warnings.simplefilter("always")
    warnings.showwarning = note  # type: ignore[assignment]
    torch.cuda.set_sync_debug_mode("warn")
    status = main(["bench", *BENCH, *arguments])
    for place in places:
        print(f"the host waits for the device: {place}")
    # NCCL's watchdog looks first, and then the thread that asks it.
    time.sleep(2.0)
    pending = list(device_time_limit().pending)
    for started in pending[:1]:
        print(f"of {len(pending)} collectives no end is known, first: {started}")
    if status or pending or places:
        return status or 1
    return _proven("all chains give stock's results over NCCL")


def _proven(what: str) -> int:
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"proven: {what}")
    return 0


PARTS = {
    "versions": versions,
    "bits": bits,
    "record": record,
    "replay": replayed,
    "host": host,
    "times": times,
    "gloo": gloo,
    "bench": bench,
}


def main() -> int:
    """Run one part."""
    parser = argparse.ArgumentParser(usage=__doc__, add_help=False)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--short", action="store_true")
    parsed, arguments = parser.parse_known_args()
    return PARTS[parsed.part](parsed.short, arguments)


if __name__ == "__main__":
    sys.exit(main())
