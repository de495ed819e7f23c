"""Does the diagnosis name faults nobody tuned it to, and keep quiet on healthy runs? Really trained runs tell."""
