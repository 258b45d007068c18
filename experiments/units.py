"""The units in which numbers of summary.json are shown."""


def unit_of(metric: str) -> str:
    """Return the unit in which a number of summary.json is shown."""
    if "bytes" in metric:
        return "bytes"
    if metric.endswith("_models"):
        return ""
    if "accuracy" in metric or "_tpr_" in metric or metric == "labels_found" or metric.startswith("novel_"):
        return "%"
    return "dB" if "psnr" in metric else "s" if "seconds" in metric else ""
