"""What will be started: files and command line, as text."""
