"""The communicators that are ours: their groups, and their budget."""

# CTAs (thread blocks) of a communicator: each keeps an SM busy and drives a channel. With 8 for
# each of the two a chain takes 16 SMs. DeepEP takes 20 and Hybrid-EP 16 to 24; NCCL's own limit on
# Hopper is 32 (megatron/core/parallel_state.py).
DEFAULT_MAX_CTAS = 8
OWN_GROUPS = ("node", "rail")
