"""A row whose ranks face one process: what each of them holds, and which questions it is asked."""
