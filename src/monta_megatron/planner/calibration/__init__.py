"""From a calibration's times to a cluster: points, fits, doubts, costs. No torch."""
