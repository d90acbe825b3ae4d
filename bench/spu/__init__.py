"""SecretFlow SPU beside us: the same workloads, run by the interpreter that SPU_PYTHON names."""
