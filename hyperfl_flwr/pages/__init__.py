"""HTML pages that the commands write: templates, style and figures in SVG."""
