"""Which chain, in how many chunks: predicted from measured curves. No torch, no process group."""
