"""What the ranks of a command share, be it a benchmark, a calibration or a recording.

Without torch:
    this_rank   which rank this process is, as the launcher says
With torch:
    joined      joining the launch, waiting for each other, sharing what rank 0 finds
"""
