"""`monta bench`: stock dispatchers and ours, on the same data, checked first, timed side by side.

Without torch:
    settings    settings with their flags, resolved and checked
    report      rows and their tables
With torch:
    candidates  the dispatchers to compare, their data and experts, and one run of them
    measure     one point: equality with stock, bytes, interleaved repeats, their report
"""
