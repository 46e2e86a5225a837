"""`monta timeline`: overlap in a recorded run or in the cost model.

Without torch:
    spans       timelines: what ran when on which resource, how busy it was, how much was hidden
    predicted   the cost model's spans
    recording   a recorded run as a file
    picture     PNGs: a timeline pass by pass, or stock's above a chain's
    drawing     which of them is drawn, and its files
With torch:
    record      runs a chain under a launch and records it
"""
