"""The commands by name, and where each of them is. No command is loaded to know that there is one."""

from __future__ import annotations

#: Command -> the module that holds it. Imported when asked for: `ls` never pays for the screen.
COMMANDS = {
    "ui": "tui_debugger.commands.ui",
    "demo": "tui_debugger.commands.demo",
    "record": "tui_debugger.commands.record",
    "ls": "tui_debugger.commands.ls",
    "show": "tui_debugger.commands.show",
    "samples": "tui_debugger.commands.samples",
    "compare": "tui_debugger.commands.compare",
    "replay": "tui_debugger.commands.replay",
    "capsule": "tui_debugger.commands.capsule",
    "referee": "tui_debugger.commands.referee",
    "mismatch": "tui_debugger.commands.mismatch",
    "diagnose": "tui_debugger.commands.diagnose",
    "parity": "tui_debugger.commands.parity",
    "weights": "tui_debugger.commands.weights",
    "gather": "tui_debugger.commands.gather",
    "upload": "tui_debugger.commands.upload",
    "info": "tui_debugger.commands.info",
    "cache": "tui_debugger.commands.cache",
    "help": "tui_debugger.commands.help",
    "completion": "tui_debugger.commands.completion",
    "skill": "tui_debugger.commands.skill",
}

HIDDEN = ("ui",)
