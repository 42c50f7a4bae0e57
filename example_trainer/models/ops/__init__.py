"""The decoder's operations, one table for each kind of arithmetic."""
