"""What runs in the micro-batches of an exchange, chosen by all of its ranks alike."""

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from monta_megatron.chains import Chain
from monta_megatron.common.rules import hash_of
from monta_megatron.exchange.counts import ExchangeCounts
from monta_megatron.integration.agreement import agree
from monta_megatron.planner.chain_policy import ChainChoice, ChainPolicy

if TYPE_CHECKING:
    from monta_megatron.exchange.pass_times import PassTimes


class Choices:
    """What runs in each micro-batch, where the policy says it once and for all.

    Args:
        policy: the policy.
        rule: what all ranks of the exchange have agreed on.
        group: the ranks of the exchange.

    Attributes:
        agreement: hash of what they agree on now.
        pass_times: times the passes; None where no times are wanted.
    """

    def __init__(self, policy: ChainPolicy, rule: dict[str, Any], group: dist.ProcessGroup) -> None:
        self._policy = policy
        self.agreed_rule = rule
        self.group = group
        self.agreement = hash_of(rule)
        self.pass_times: PassTimes | None = None

    def expected(self) -> ChainChoice | None:
        """What will run, as far as it is known before the counts are."""
        return self._policy.choose(1)

    def choose(
        self, counts: ExchangeCounts, device: torch.device, side_stream: torch.cuda.Stream
    ) -> ChainChoice:
        """What runs in a micro-batch of a layer, by its counts.

        Args:
            counts: which every rank of the exchange has; all ask in the same order.
            device: where the exchange runs.
            side_stream: for copies between host and device.

        Raises:
            ValueError: the ranks disagree; names the first that differs.
        """
        self._check_agreement(counts)
        return self._policy.choose(counts.max_tokens, counts.max_experts_per_token)

    def chains_to_check(
        self, choice: ChainChoice, counts: ExchangeCounts
    ) -> list[tuple[Chain, int]]:
        """Chains and numbers of chunks that may be used for the first time from here on.

        The same on all ranks of the exchange.
        """
        return [(choice.chain, choice.num_chunks)]

    def news(self, choice: ChainChoice, counts: ExchangeCounts) -> str:
        """Why that was chosen for these counts, if it has to be said and was not said before."""
        return ""

    def rule(self) -> dict[str, Any]:
        """What all ranks of the exchange have to agree on now."""
        return self.agreed_rule

    def _check_agreement(self, counts: ExchangeCounts) -> None:
        if len(set(counts.hashes.tolist())) > 1:
            # They agreed at construction: one has another configuration since, or another number
            # of iterations.
            agree(self.rule(), self.group)
