"""Memory by kind: measured while a step runs, and planned before anything does."""
