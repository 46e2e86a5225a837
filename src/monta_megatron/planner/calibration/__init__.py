"""From what a calibration has timed to a cluster: points, fits, doubts, costs. No torch."""
