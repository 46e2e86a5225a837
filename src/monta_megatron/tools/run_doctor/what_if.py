"""Predictions of other choices than a run's, by its model, cluster and layout.

All of it is predicted, for the model's own router and the tokens of a rank; of exchanges that lie
on the nodes in several ways, the one that is slowest as it ran counts.
"""

from dataclasses import replace

from monta_megatron.chains import CHAINS
from monta_megatron.chains.wire_format import quantized_passes
from monta_megatron.integration.options import AUTO
from monta_megatron.planner.chain_price import ChainPrice, price_chain
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.layout import with_experts
from monta_megatron.planner.select import select_chain
from monta_megatron.planner.workload import Workload
from monta_megatron.tools.launch.arguments import Arguments
from monta_megatron.tools.launch.exchanges import RunExchanges
from monta_megatron.tools.run_doctor.figures import Choice, WhatIf

# Arguments that leave auto nothing to choose.
NAMING = ("moe-monta-chain", "moe-monta-num-chunks", "moe-monta-plan")


def what_if(
    exchanges: RunExchanges, arguments: Arguments, ran: tuple[str, int], experts_pipelined: bool
) -> tuple[WhatIf, ChainPrice]:
    """Predictions of other choices, and the price of the run's own.

    Args:
        exchanges: what the run exchanges.
        arguments: Megatron's arguments of the run.
        ran: chain and number of chunks.
        experts_pipelined: whether the experts ran in the pipeline.
    """
    model, kernels = exchanges.model, arguments.get("moe-monta-kernels")
    # As the training prices them, which runs fused kernels on a GPU unless it is told not to.
    fused = kernels is None or kernels.value != "torch"
    cluster = exchanges.cluster.with_kernels(fused)
    workloads = [
        replace(
            workload,
            quantized_passes=quantized_passes(
                "moe-monta-wire-dtype" in arguments, "moe-monta-wire-backward" in arguments
            ),
            keeps_sums="moe-monta-combine-dtype" in arguments,
        )
        for workload in exchanges.workloads
    ]
    price, workload = max(
        ((_price(workload, cluster, ran), workload) for workload in workloads),
        key=lambda priced: priced[0].total_us,
    )
    in_eight_bits = replace(workload, quantized_passes=quantized_passes(True))
    layers = select_chain(with_experts(workload, model, cluster), cluster).prices
    split = next((layer for layer in layers if layer.experts_pipelined), None)
    unsplit = next(layer for layer in layers if not layer.experts_pipelined)
    found = WhatIf(
        basis="model and cluster file, the model's own router",
        ran=_choice(price),
        fastest=_choice(select_chain(workload, cluster).price),
        eight_bits=None
        if workload.quantized_passes
        else _choice(_price(in_eight_bits, cluster, ran)),
        experts_us=unsplit.busy_us("compute"),
        unsplit=_choice(unsplit),
        split=None if split is None else _choice(split),
        is_named=any(name in arguments and arguments[name].value != AUTO for name in NAMING),
        experts_asked="moe-monta-overlap-experts" in arguments,
        experts_pipelined=experts_pipelined,
    )
    return found, price


def _price(workload: Workload, cluster: Cluster, ran: tuple[str, int]) -> ChainPrice:
    chain, num_chunks = ran
    return price_chain(workload, cluster, CHAINS[chain], num_chunks, "forward_backward")


def _choice(price: ChainPrice) -> Choice:
    return Choice(
        chain=price.chain.name,
        num_chunks=price.num_chunks,
        us=price.total_us,
        peak_bytes=price.peak_bytes,
    )
