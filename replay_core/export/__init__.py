"""Documents that leave the machine: one builder per kind, one published schema, one way to write a number."""
