"""`monta bench`: stock dispatchers and ours, on the same data, checked first, timed side by side.

Without torch:
    flags           the flags that become settings
    settings        what was asked for
    sweep           many points in a file, and their results in another
    traffic         bytes that stock moves, and bytes that have to move
    statistics      median, spread, interval of a ratio
    prediction      what the planner predicts
    report          rows and tables
    ablation_steps  the steps of the paper, and what each gains
    summary         figures over many points: regret, errors, auto against stock
    summary_tables  the same as Markdown
    plots           bars by chain
    sweep_plots     time against size, predicted against measured
With torch:
    workload        tokens, probabilities, gradients
    candidates      the dispatchers to compare, and how to run one
    checks          equal to stock, before anything is timed
    ablation        the dispatchers of the ablation's steps
    bound           stages alone, and how close the pipeline comes to the slowest
    timing          interleaved repeats
    point           one point: its dispatchers and their rows
    run             all points, on one rank
"""
