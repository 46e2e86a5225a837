"""`monta bench`: stock dispatchers and ours, on the same data, checked first, timed side by side.

Without torch:
    flags       the flags that become settings
    settings    what was asked for
    traffic     routing, bytes that stock moves and that have to move, predicted times
    report      statistics, rows, tables and pictures
With torch:
    layer       Megatron's groups, dispatchers and experts
    candidates  the dispatchers to compare, their data, and how to run one
    measure     equal to stock, then interleaved repeats
    point       one point: its dispatchers, their rows, its report
"""
