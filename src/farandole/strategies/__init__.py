"""How updates are exchanged: one module per strategy."""
