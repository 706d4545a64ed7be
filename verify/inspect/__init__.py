"""What a file of requests shares, before anyone runs it: `radixmlp inspect`."""
