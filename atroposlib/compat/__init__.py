"""Names that environments written for the public SDK import, and that nothing else here needs."""
