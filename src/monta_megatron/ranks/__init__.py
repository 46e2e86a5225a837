"""What the ranks of a command share, be it a benchmark, a calibration or a recording.

Without torch:
    this_rank   which rank this process is, as the launcher says
    cause       why a run ended, from what its ranks printed
With torch:
    torchrun    torchrun, whose failure is one line
    joined      joining the launch, waiting for each other, sharing what rank 0 finds
"""
