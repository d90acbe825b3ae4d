"""The protocols of the paper, joining `refmpc` and `vfl`."""
