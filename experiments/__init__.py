"""From settings to runs, and from runs to tables and figures."""
