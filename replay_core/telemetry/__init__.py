"""What a running job costs: memory and time of this process, once a second. Never imports torch."""
