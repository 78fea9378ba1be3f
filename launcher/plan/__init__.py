"""The plan as data: typed settings with their sources, and the facts that it is made from."""
