"""`monta timeline`: what overlapped with what, in a recorded run or in the cost model.

Without torch:
    spans       what ran when, on which resource
    predicted   the cost model's spans
    recording   a recorded run as a file
    overlap     how busy each resource was, and how much of that was hidden
    trace       a Chrome trace
    comparison  a PNG of two timelines, stock's and a chain's
    picture     a PNG of a timeline, pass by pass
With torch:
    step_times  takes the times of the executor's steps
    clock       one clock for all ranks
    record      runs a chain under a launch and records it
"""
