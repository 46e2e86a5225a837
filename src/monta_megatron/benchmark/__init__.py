"""`monta bench`: stock dispatchers and ours, on the same data, checked first, timed side by side.

Without torch:
    launch        ranks and nodes, as the launcher tells them
    settings      what was asked for
    routing       which experts each token goes to
    traffic       bytes that stock moves, and that have to move
    statistics    median, spread, interval of a ratio
    prediction    what the planner says beforehand
    report        rows, table, versions and machine
    plots         bars by chain
With torch:
    workload      tokens, probabilities, gradients
    candidates    the dispatchers to compare, and one run of one
    checks        equal to stock, before anything is timed
    ablation      the steps of the paper
    bound         stages alone, and how close the pipeline comes to the slowest
    timing        interleaved repeats
    run           all of it, on one rank
"""
