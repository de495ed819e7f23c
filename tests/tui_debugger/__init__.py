"""Tests of the screen and of the command line."""
