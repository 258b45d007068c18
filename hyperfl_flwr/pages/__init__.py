"""The HTML pages that the product writes: templates, style and figures in SVG."""
