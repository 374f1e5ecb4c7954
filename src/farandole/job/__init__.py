"""Training jobs: their life, their folder and what is shown of them."""
