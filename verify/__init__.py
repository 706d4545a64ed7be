"""The harness: workloads, oracle, parity, compression, speed, memory, and the report."""
