"""`monta bench`: stock dispatchers and ours, on the same data, checked first, timed side by side.

Without torch:
    flags           the flags that become settings
    settings        what was asked for
    sweep           many points in a file, and their results in another
    traffic         bytes that stock moves, and bytes that have to move
    statistics      median, spread, interval of a ratio
    prediction      what the planner predicts
    report          rows and tables
    study           what the scripts of `benchmarks/` do beyond it
    regret          a pick against the best chain, not judged on what chose it
    summary         figures over many points: regret, errors, auto against stock
    summary_tables  the same as Markdown
    plots           bars by chain; time against size, predicted against measured
With torch:
    workload        tokens, probabilities, gradients
    candidates      the dispatchers to compare, and how to run one
    checks          equal to stock, before anything is timed
    timing          interleaved repeats
    point           one point: its dispatchers and their rows
    run             all points, on one rank
"""
