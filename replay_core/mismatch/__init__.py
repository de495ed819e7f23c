"""Engine against trainer: which setting of either side closes the gap between their log-probabilities."""
