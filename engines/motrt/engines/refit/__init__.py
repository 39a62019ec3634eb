"""New weights for a bundle, on disk or in a running process: both engines, or neither."""
