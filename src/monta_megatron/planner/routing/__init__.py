"""Traffic of a routing: expected, drawn at random, recorded in a trace, observed in a training."""
