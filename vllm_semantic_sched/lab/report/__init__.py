"""A result as one HTML page: `content` is what it shows, `page` writes it."""
