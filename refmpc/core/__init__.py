"""What every protocol stands on: shares, parties, rounds, declared costs, the ledger, exact constants, errors."""
