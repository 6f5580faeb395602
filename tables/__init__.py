"""Token tables: rows, their optimizer, and where both are stored."""
