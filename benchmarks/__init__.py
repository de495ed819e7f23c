"""The speed budgets, each beside what it is measured against: `make bench`, or `python -m benchmarks [ROW ...]`."""
