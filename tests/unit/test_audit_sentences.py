"""The sentence about an attack says what its numbers mean."""

import pytest

from hyperfl_flwr.audit.sentences import sentence


@pytest.mark.parametrize(
    ("roundings", "words"),
    [([24.0], "In the only upload the gradient"), ([0.1, 24.0], "In 1 of 2 uploads the gradient"), ([0.1], "")],
)
def test_a_sentence_says_that_an_upload_below_the_rounding_tested_nothing(roundings: list[float], words: str) -> None:
    """`rounding` above 1: the gradient is lost in the upload's float32."""
    statistics = {"median": 8.0, "per_image": [8.0] * len(roundings)}
    found = {
        "psnr": statistics,
        "control": {"mean_image": {"psnr": statistics}, "unrelated": {"psnr": statistics}},
        "findings": [{"rounding": rounding} for rounding in roundings],
        "verdict": "recovered nothing",
    }
    text = sentence({"attacks": {"head-gradient": found}, "threat": "one step on 1 image"}, "head-gradient")
    assert ("has tested nothing" in text) == bool(words)
    assert words in text


def test_a_sentence_says_that_images_are_ahead_by_chance() -> None:
    statistics = {"median": 8.0, "per_image": [8.0] * 60}
    found = {
        "psnr": statistics,
        "control": {"mean_image": {"psnr": statistics}, "unrelated": {"psnr": statistics, "images_ahead": 3}},
        "findings": [],
        "verdict": "recovered nothing",
        "images_recovered": 2,
    }
    text = sentence({"attacks": {"ig": found}, "threat": "one step on 60 images"}, "ig")
    assert "2 of 60 images are 6 dB ahead of their control, and for 3 an unrelated image is as far ahead" in text
    assert "no image is" not in text


def test_a_sentence_says_that_labels_alone_explain_a_score() -> None:
    scores = {"ours": 14.0, "mean_image": 10.0, "unrelated": 9.0}
    of_parts = {name: {"median": value, "per_image": [value] * 6} for name, value in scores.items()}

    def said(of_classes: float, verdict: str = "recovered") -> str:
        controls = {name: {"psnr": of_parts[name]} for name in ("mean_image", "unrelated")}
        found = {
            "psnr": of_parts["ours"],
            "control": {**controls, "class_means": {"psnr": {"median": of_classes}}, "next_client": None},
            "verdict": verdict,
            "images_recovered": 0,
        }
        return sentence({"attacks": {"ig": found}, "threat": "one step on 1 image"}, "ig")

    assert "The mean images of the classes have 13.5 dB: in the median, labels alone are as good." in said(13.5)
    assert "mean images" not in said(12.5)
    assert "mean images" not in said(13.5, "recovered some")  # of single images, which are far ahead
