"""Times single operations of an exchange, as a calibration does, on the ranks of a group."""
