"""`python -m tui_debugger` is `rldbg`."""

from tui_debugger.cli import main

main()
