"""What decisions are about: jobs, tiers, capacity, profiles, predictions."""
