"""Re-executes a recorded micro-batch with settings of your choice; the answer is itself a dump.

`flags` and `plan` are pure data and `segments` is numpy; everything that needs torch hangs below
`run`, which only the child process imports.
"""
