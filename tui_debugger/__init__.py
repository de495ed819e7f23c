"""rldbg's front ends: the screen and the command line. Draws and reads keys; imports neither torch nor numpy."""
