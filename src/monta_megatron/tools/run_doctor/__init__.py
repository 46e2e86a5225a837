"""`monta doctor --run`: causes that hold a training back, from the files in its folder.

figures    what the rules are given: numbers, and where they come from
watched    the lines of watched iterations, read and summed up
reading    the folder: which files there are, and the figures in them
what_if    what the planner expects of other choices, where model and cluster are there
rules      figures in, findings out: the table, over
           memory, bound, imbalance, experts, in the words of `wording`
report     findings as text
"""
