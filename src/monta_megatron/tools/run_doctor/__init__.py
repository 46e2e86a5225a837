"""`monta doctor --run` and `--log`: causes that hold a training back, from what it left.

reading         the folder of a run: its files, medians of watched iterations, other choices
figures         plain data that the causes are judged by
causes          figures in, findings out
report          the findings of a run, as text and JSON
training_log    arguments and iterations of a log
iteration       an iteration by part, predicted beside measured, and changes to it
"""
