"""`monta timeline`: overlap in a recorded run or in the cost model.

Without torch:
    spans       timelines: what ran when, on which resource
    predicted   the cost model's spans
    recording   a recorded run as a file
    training    an iteration of a training, recorded by its ranks
    overlap     how busy each resource was, and how much of that was hidden
    trace       a Chrome trace
    comparison  a PNG of two timelines, stock's and a chain's
    picture     a PNG of a timeline, pass by pass
    bars        what both pictures draw with
    drawing     which of them is drawn, and its files
With torch:
    record      runs a chain under a launch and records it
"""
