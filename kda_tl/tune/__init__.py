"""The search for the fastest plans: proposals, worker processes, the journal, the finals."""
