"""`monta bench`: stock dispatchers and ours, on the same data, checked first, timed side by side.

Without torch:
    launch          ranks and nodes, as the launcher tells them
    settings        what was asked for
    sweep           many points in a file, and their results in another
    routing         which experts each token goes to
    traffic         bytes that stock moves, and that have to move
    statistics      median, spread, interval of a ratio
    prediction      what the planner says beforehand
    report          rows, table, versions and machine
    ablation_steps  the steps of the paper, and what each gains
    summary         what many points say: regret, errors, auto against stock
    summary_tables  the same as Markdown
    plots           bars by chain
    sweep_plots     time against size, predicted against measured
With torch:
    workload        tokens, probabilities, gradients
    candidates      the dispatchers to compare, and one run of one
    checks          equal to stock, before anything is timed
    ablation        the dispatchers of its steps
    bound           stages alone, and how close the pipeline comes to the slowest
    timing          interleaved repeats
    point           one point: its dispatchers and their rows
    run             all points, on one rank
"""
