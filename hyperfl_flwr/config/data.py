"""Declare the settings `data.*`: partition and preparation of the data."""

from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, field_validator

from hyperfl_flwr.config.grouping import Grouping
from hyperfl_flwr.core.settings import Auto, Positive, Section, Seed, Share, ShareBelowOne, setting
from hyperfl_flwr.core.target_scale import scale_problem
from hyperfl_flwr.data.sample_format import parse_classes, parse_normalisation, parse_shape, parse_window


def _window(text: str) -> str:
    parse_window(text)
    return text


class DataConfig(Section):
    """Partition and preparation of the data."""

    key: ClassVar[str] = "data"
    title: ClassVar[str] = "Data"

    partition: Literal["similarity", "iid", "dirichlet", "dirichlet-per-label", "shards", "natural"] = setting(
        "similarity",
        "How the samples are divided among the clients.\n\n"
        "`similarity`: equal sizes; `data.iid-fraction` from all classes, the rest from the three dominant classes "
        "of the client's group. `iid`: equal sizes from all classes. `dirichlet`: equal sizes; class shares drawn "
        "per client from Dir(α). `dirichlet-per-label`: unequal sizes; each class divided among the clients in "
        "shares drawn from Dir(α), as Flower Datasets does. `shards`: samples sorted by label and cut into shards, "
        "`data.shards-per-client` random ones per client. `natural`: the samples with the client's id, for `omniglot`, "
        "and for `npz` and `csv` files with client ids.",
    )
    seed: Seed = setting(0, "Seed of the partition.", values="whole number from 0 to 2^63 - 1")
    train_samples: Auto | Positive = setting(
        "auto",
        "Training samples per client. `auto`: as in the paper that uses the data set, or as many as possible without "
        "using a sample twice.",
    )
    test_samples: Auto | Positive = setting("auto", "Test samples per client. `auto`: as for training samples.")
    iid_fraction: Share = setting(0.2, "Share of a client's samples drawn from all classes; for `similarity`.")
    dirichlet_alpha: Annotated[float, Field(ge=1e-6, le=1e6)] = setting(
        0.3,
        "Concentration α of the two Dirichlet partitions; a small one makes clients differ.",
        values="number > 0",
    )
    shards_per_client: Positive = setting(2, "Number of shards per client; for `shards`.")
    augmentation: Literal["auto", "none"] = setting(
        "auto", "`auto`: random crops and flips for the data sets that are usually trained with them."
    )
    validation_fraction: ShareBelowOne = setting(
        0.0,
        "Share of each client's training samples that is held back as validation data. With `early-stopping` or `keep "
        "= best`, they decide when training ends and which models are kept. Otherwise they replace the test samples, "
        "so that settings can be chosen without test data. A client with data of its own, or one that the data set "
        "defines, has at least one validation sample. A sample that is used more than once is held back wherever it "
        "is used.",
    )
    group_by: Grouping = setting(
        "auto",
        "How the samples of one subject, such as a patient, are recognised; they all go to the same part of the data: "
        "training, validation or test. `auto`: by the key `groups` of an `npz` file. `folder`: in `folder:` data, by "
        "the first folder below that of the class. A regular expression with one group, such as `(p[0-9]+)_`: by what "
        "the group matches in the path below the folder of the class. `none`: not at all.",
        values="`auto`, `none`, `folder`, regular expression",
    )
    global_test: bool = setting(
        False, "After the last round, also evaluate each client on all test data of the data set."
    )
    classes: str = setting(
        "auto",
        "Names of the classes in the order of their numbers, for data in which a client may lack a class; with another "
        "`task` the names of the labels or targets. `auto`: those of the data.",
        values="`auto`, names with commas between them",
    )
    input_shape: str = setting(
        "auto",
        "Channels (1 or 3), height and width of images, for example `1x28x28`. Images of `folder:` are converted and "
        "resized to it, others must have it. `auto`: that of the data.",
        values="`auto`, three numbers with `x` between them",
    )
    window: Annotated[str, AfterValidator(_window)] = setting(
        "auto",
        "Range of values in grey `folder:` images with more than 8 bits (16-bit PNG and TIFF, DICOM), for example "
        "`0/4095` or `-1000/400`: LOW becomes black and HIGH white, values between are rounded to 8 bits, and values "
        "outside are clipped. `auto`: such images are refused.",
        values="`auto`, `LOW/HIGH`",
    )
    normalisation: str = setting(
        "auto",
        "Mean and standard deviation of pixels in [0, 1], for example `0.13/0.31`; one number, or one per channel, "
        "separated by commas. `auto`: of the training images of all clients; 0.5 and 0.5 for `folder:` and if a node "
        "has local data.",
        values="`auto`, `MEAN/STD`",
    )

    target_scale: str = setting(
        "auto",
        "Mean and standard deviation of the targets of a regression, for example `50/12`; one number, or one per "
        "target, separated by commas. Networks predict the standardised targets, and the errors that clients report "
        "are in this unit. `auto`: of the training data of all clients; refused if a node has local data.",
        values="`auto`, `MEAN/STD`",
    )

    @field_validator("classes")
    @classmethod
    def _names(cls, value: str) -> str:
        parse_classes(value)
        return value

    @field_validator("input_shape")
    @classmethod
    def _shape(cls, value: str) -> str:
        parse_shape(value)
        return value

    @field_validator("target_scale")
    @classmethod
    def _scale(cls, value: str) -> str:
        if (found := parse_normalisation(value)) and (problem := scale_problem(*found)):
            raise ValueError(f"must be auto or MEAN/STD; {problem}; got {value!r}")
        return value

    @field_validator("normalisation")
    @classmethod
    def _mean_and_std(cls, value: str) -> str:
        parse_normalisation(value)
        return value
