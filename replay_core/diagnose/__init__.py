"""Numbers into findings: what is wrong in the training maths, with the evidence, and what to do next."""
