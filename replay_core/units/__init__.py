"""Units: a long job cut into jobs of one file each, that any number of workers take, and folded again.

One job on one part of a run is a unit, named by the digest of its records, its weights, its settings and this version.
A worker that finds its file takes the next: who was killed is started again, and only what is left runs.
"""
