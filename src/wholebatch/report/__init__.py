"""Faces for people: the ledger of a plan, the verdict of a check, the story of a run."""
