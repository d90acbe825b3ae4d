"""Functions built from primitives: reciprocals, roots, exponentials, Gaussians, and their stored coefficients."""
