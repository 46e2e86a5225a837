"""Calibration: operations to time, their timer, and the fit of cost curves."""
