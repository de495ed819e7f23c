"""Documents as plain text for standard output: readable without colour, one file per kind."""
