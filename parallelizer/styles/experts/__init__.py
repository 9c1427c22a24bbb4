"""The style `experts`: the tokens of a mixture travel to the ranks that hold their experts."""
