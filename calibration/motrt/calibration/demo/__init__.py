"""What ``motrt demo`` shows: the tiny omni model at work, or any bundle."""
