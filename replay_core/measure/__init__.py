"""Statistics of one tensor and figures of a pair: the same numbers everywhere. No torch."""
