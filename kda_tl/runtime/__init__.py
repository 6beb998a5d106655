"""From a plan to launches: kernels compiled once, programs replayed, the plan of a call chosen."""
