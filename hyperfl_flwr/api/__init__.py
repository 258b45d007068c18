"""The Python interface: starts and resumes runs, and uses finished ones."""
