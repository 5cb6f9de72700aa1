"""What travels, and how it is counted."""
