"""Columnar click logs: preparing, generating and reading batches."""
