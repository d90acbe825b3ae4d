"""Programs that make the numbers stored in ``refmpc.mathematics``."""
