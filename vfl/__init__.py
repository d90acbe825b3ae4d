"""Secure and private vertical federated learning: the federated side and the DP engine (no MPC code)."""
