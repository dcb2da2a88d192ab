"""Who has to go for whom, and what becomes of its KV."""
