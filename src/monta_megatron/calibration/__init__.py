"""Calibration of a cluster: what is timed, the timer, the fit, and the command."""
