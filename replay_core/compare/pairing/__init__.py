"""Which record and which tensor of two runs belong together, and which of their rows are the same token."""
