"""Does the diagnosis name faults that nobody tuned it to, and keep quiet on healthy runs? Really trained runs say so."""
