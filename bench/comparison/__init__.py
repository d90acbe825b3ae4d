"""Ours and other systems on the same workloads, under the same network: what ``bench.compare`` measures."""
