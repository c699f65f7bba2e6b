"""How the ranks of a training job share its model: what goes together, and how the model is cut."""
