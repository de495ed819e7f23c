"""One tensor under the glass, or two side by side: what it holds, what stands beside it, where the two differ."""
