"""When a step exists, which steps exist, and which may go. No torch."""
