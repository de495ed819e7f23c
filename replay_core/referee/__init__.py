"""The referee: each side of a dump against fp64 of its own recorded inputs, in units of its own rounding.

`recorded`    what one side recorded of a micro-batch, token by token.
`arithmetic`  the model's own code in fp64 behind its own dtypes: exact, or with rounding's noise at every operation.
`shadow`      the model run with every recorded tensor in its place: what each module should have made of its inputs.
`figures`     an error against the noise of the same module: its size, and its structure.
`gradients`   the same of a linear's weight gradient.
`scalars`     losses and KL in the noise that log-probabilities leave of them.
`limits`      where noise ends.
`grafting`    one side's output of a module in the other's forward.
`ruling`      each side, then the two; `ruled` is what comes of it, and what is missing where nothing does.
"""
