"""Skills of the tiny trained model, measured by looking at what it makes."""
