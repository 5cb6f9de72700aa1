"""What the trainer works with: the loss guard, step figures, stop signals, the run folder and its summary."""
