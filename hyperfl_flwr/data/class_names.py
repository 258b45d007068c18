"""Names of the classes of the data sets, for people."""

import string

from hyperfl_flwr.data.sources.omniglot import CHARACTERS

_FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
_CIFAR10 = "airplane automobile bird cat deer dog frog horse ship truck"
_CIFAR100 = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant flatfish
forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle
mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine
possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar
sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle wardrobe whale willow_tree
wolf woman worm"""

CLASS_NAMES = {
    "fashion-mnist": _FASHION,
    "emnist": tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase),
    "cifar10": tuple(_CIFAR10.split()),
    "cifar100": tuple(_CIFAR100.split()),
    "cinic10": tuple(_CIFAR10.split()),
    "omniglot": tuple(CHARACTERS),
}
"""Names of the classes by data set, in the order of the labels; classes of other data sets have no names."""


def class_names(dataset: str, num_classes: int) -> tuple[str, ...]:
    """Return the names of the classes 0..K-1 of a data set; their numbers if they have no names."""
    return CLASS_NAMES.get(dataset) or tuple(map(str, range(num_classes)))
