"""Speed and memory against the public implementations, on models of the bench's own making."""
