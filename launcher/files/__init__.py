"""Files that are read and written with care: what is shipped, what a run leaves, what nobody may see."""
