"""Text for the main job: corpora of sentences by client, and next-word examples."""
