"""Plans for the models, right and wrong, each with the verdict that is expected."""
