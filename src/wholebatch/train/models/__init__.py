"""The models of the training job: the built-in GPT, a Hugging Face folder, or one of the user's own."""
