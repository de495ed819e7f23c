"""Steps of an optimizer that keeps the squares of a matrix' gradients as means of rows and of columns (Adafactor,
Shazeer & Stern 2018, algorithm 4). From nothing

    r_i = mean_j g_ij^2        c_j = mean_i g_ij^2        u_ij = g_ij / sqrt(r_i c_j / mean_i r_i)

whatever its decay is, for the first step's is 0, and however a gradient was clipped, for u is the same of any multiple.
A later step is its gradient times a number of the row and one of the column too, whatever was before.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]

#: What is added to the squares (section 7.2), so that a row that is nothing stays so.
_LEAST = 1e-30
#: How often rows and columns are fitted in turn.
_TURNS = 30


def first_step(gradient: F64) -> F64:
    """gradient [O, I]: the step's direction, of a learning rate of 1."""
    squares = np.square(gradient) + _LEAST
    rows, columns = squares.mean(1, keepdims=True), squares.mean(0, keepdims=True)
    made: F64 = gradient / np.sqrt(rows * columns / rows.mean())
    return made


def times(step: F64, gradient: F64) -> F64:
    """The numbers [O, I] that a step is its gradient times, each of a row's times a column's: the nearest ones."""
    along, squares = step * gradient, np.square(gradient)
    column = np.ones(step.shape[1])
    row = np.zeros(step.shape[0])
    for _ in range(_TURNS):
        row = _ratio(along @ column, squares @ np.square(column))
        column = _ratio(row @ along, np.square(row) @ squares)
    made: F64 = np.outer(row, column)
    return made


def _ratio(one: F64, other: F64) -> F64:
    return np.divide(one, other, out=np.zeros_like(one), where=other > 0)
