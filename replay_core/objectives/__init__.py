"""The formulas of policy optimisation, each once, for numpy arrays and torch tensors alike. Imports nothing by itself.

Every function works in the library and dtype of its arguments; torch is never imported here, so a
reader checks a trainer's advantages without it and a trainer differentiates through the same lines.
"""
