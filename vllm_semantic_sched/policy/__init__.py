"""Every scheduling decision, in pure Python: no engine, no model, no clock of its own."""
