"""What runs next: ranks and queues, aging, deadlines, shares, tenants, reservations."""
