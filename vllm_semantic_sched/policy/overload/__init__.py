"""What is let in, promised, shed and refused."""
