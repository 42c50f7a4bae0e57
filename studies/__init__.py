"""How things that ship with this repository were made."""
