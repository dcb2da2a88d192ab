"""What the API server gains: refusals with HTTP statuses, operator endpoints, tenant names."""
