"""`monta timeline`: what overlaps with what, in a trace or as predicted. No torch.

report      the timelines that are compared, and how much of each resource was hidden
picture     stock's timeline above ours
"""
