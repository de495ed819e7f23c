"""The referee: each side of a dump against fp64 of its own recorded inputs, in units of its own rounding.

`recorded`    what one side recorded of a micro-batch, token by token.
`arithmetic`  the model's own code in fp64 behind its own dtypes: exact, or with rounding's noise at every operation.
`products`    the products of its weights, piece by piece, and what of them is kept from run to run.
`shadow`      the model run with every recorded tensor in its place: what each module should have made of its inputs.
`figures`     an error against the noise of the same module: its size, and its structure.
`gradients`   the same of a linear's weight gradient.
`scalars`     losses and KL in the noise that log-probabilities leave of them.
`limits`      where noise ends.
`grafting`    one side's output of a module in the other's forward.
`ruling`      each side, then the two; `ruled` is what comes of it, and what is missing where nothing does.
"""

import os

# torch's large tensors in large pages: they come and go with every run, and half the time went into faults of pages.
# Asked by torch once, at its first tensor; it does nothing where the system has none.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
