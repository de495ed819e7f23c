"""Runs a Job in a child process: ChildRunner for the command line, AsyncChild for the screen.

The child itself is `replay_core/__main__.py`; `wire.py` is what the three agree on.
This package imports nothing by itself.
"""
