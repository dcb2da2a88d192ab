"""Choice of victims, and plans for their KV."""
