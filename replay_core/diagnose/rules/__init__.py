"""The rules, a file per family: both readings of a finding, from tensors and from a log, and the thresholds they share.

Adding a rule is adding a function here; `engine.rules` finds every file of this folder.
"""
