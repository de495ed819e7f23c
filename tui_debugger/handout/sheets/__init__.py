"""A file per kind of document: what its handout says, and in which order."""
