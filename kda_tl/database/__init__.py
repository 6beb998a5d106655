"""Tuned plans: their records, the files that hold them, and the one that fits a call."""
