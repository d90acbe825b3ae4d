"""MP-SPDZ beside us: our programs for it, and a runner for a checkout that the user has built."""
