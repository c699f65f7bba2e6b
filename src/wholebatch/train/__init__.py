"""The ready-made training job: config, data, model, job, display."""
