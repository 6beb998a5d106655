"""Named workloads, how a launch is timed, and what a stage is checked and timed on."""
