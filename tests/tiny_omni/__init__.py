"""How the tiny omni model was trained; see README.md here."""
