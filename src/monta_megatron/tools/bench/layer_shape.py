"""The sizes of an MoE layer that is measured by itself. No torch."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """The MoE layer whose exchange is measured.

    Attributes:
        num_experts: experts of the layer.
        topk: experts of each token.
        hidden: hidden size.
        ffn_hidden: intermediate size of the experts.
        dtype: PyTorch's name of the dtype of parameters and rows; probabilities are fp32.
        tp: tensor parallel size.
        ep: expert parallel size.
        etp: expert tensor parallel size.
    """

    num_experts: int
    topk: int
    hidden: int
    ffn_hidden: int
    dtype: str
    tp: int
    ep: int
    etp: int
