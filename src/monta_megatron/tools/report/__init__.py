"""`monta report`: a model on a cluster as one HTML page that loads nothing.

markup     pieces of the page: tables, pictures; all texts are escaped here
sections   the parts: plan, timelines, benchmark, calibration
page       the whole page
"""
