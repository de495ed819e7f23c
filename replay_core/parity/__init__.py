"""Two critics side by side on the same tokens: how far their values part, where, and why.

Each critic runs in a child of its own and writes an ordinary dump; the parent compares the dumps.
"""
