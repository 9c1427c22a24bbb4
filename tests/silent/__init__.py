"""Right and wrong plans of models of people's own, judged by gradients of an independent run."""
