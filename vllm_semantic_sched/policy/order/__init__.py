"""Order of requests: queues, aging, deadlines, shares, tenants, reservations, stages."""
