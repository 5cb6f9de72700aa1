"""Which rank owns which rows of which table."""
