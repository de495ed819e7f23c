"""From figures of a pair to a verdict: one table of rules."""
