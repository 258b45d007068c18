"""Write a network on a pre-trained body as Python source without this package, for exported models."""

from hyperfl_flwr.core.rng import seed_for
from hyperfl_flwr.models.pretrained.adapters import BOTTLENECK
from hyperfl_flwr.models.pretrained.libraries import without_values
from hyperfl_flwr.models.pretrained.names import Body
from hyperfl_flwr.models.pretrained.network import PROJECTION_SEED, PretrainedExtractor

CONSTANTS = """WEIGHTS = None  # file with the weights of the body; None: the download of {library}
BODY = "{sha256}"  # SHA-256 of these weights
"""

ARGUMENT = """    if len(sys.argv) > 2:
        WEIGHTS = sys.argv[2]
"""

_SOURCE = """    import hashlib

    from torch.nn import functional

    class MapAdapter(nn.Module):
        def __init__(self, channels):
            super().__init__()
            self.scale_in, self.shift_in, self.scale_out, self.shift_out = (
                nn.Parameter(torch.empty(channels)) for _ in range(4)
            )
            self.weight = nn.Parameter(torch.empty(channels, channels))

        def forward(self, maps):
            si, ti, so, to = (
                values[:, None, None] for values in (self.scale_in, self.shift_in, self.scale_out, self.shift_out)
            )
            return (maps + functional.conv2d(maps * si + ti, self.weight[:, :, None, None])) * so + to

    class TokenAdapter(nn.Module):
        def __init__(self, channels):
            super().__init__()
            self.down, self.up = nn.Linear(channels, {bottleneck}), nn.Linear({bottleneck}, channels)
            self.norm = nn.LayerNorm(channels)

        def forward(self, tokens):
            return tokens + self.norm(self.up(torch.relu(self.down(tokens))))

    class Extractor(nn.Module):
        def __init__(self, body, places):
            super().__init__()
            self.adapters = nn.ModuleList(
                MapAdapter(channels) if layout == "maps" else TokenAdapter(channels) for _, channels, layout in places
            )
            for (name, _, _), adapter in zip(places, self.adapters):
                hook = lambda _, __, output, adapter=adapter: adapter(output)
                body.get_submodule(name).register_forward_hook(hook)
            self.__dict__["body"] = body.eval()  # no part of the parameters
{projection}

        def forward(self, images):
            images = images.expand(-1, 3, -1, -1) if images.shape[1] == 1 else images
{resize}            return self.project(self.body(images))

    def read(path):
        values = load_file(path) if str(path).endswith(".safetensors") else torch.load(path, weights_only=True)
        for key in ("state_dict", "model"):
            values = values[key] if isinstance(values.get(key), dict) else values
        return values

{body}
    total = hashlib.sha256()
    for name, value in sorted(values.items()):
        if not name.startswith({heads}) and not name.endswith("num_batches_tracked"):
            total.update(f"{{name}} {{value.dtype}} {{tuple(value.shape)}}\\n".encode())
            total.update(value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    if total.hexdigest() != BODY:
        raise SystemExit("the weights of the body are not those of the training; give their file as second argument")
    extractor = Extractor(body, {places})"""

_TORCHVISION = """    from torchvision.models import get_model, get_model_weights

    body = get_model("{model}", weights=None)
    values = read(WEIGHTS) if WEIGHTS else get_model_weights("{model}")["DEFAULT"].get_state_dict()
    body.load_state_dict(values, strict=False)
    parent, _, leaf = "{head}".rpartition(".")
    setattr(body.get_submodule(parent), leaf, nn.Identity())"""

_TIMM = """    import timm

    values = read(WEIGHTS) if WEIGHTS else timm.create_model("{model}", pretrained=True, num_classes=0).state_dict()
    given = {{"state_dict": dict(values)}}
    body = timm.create_model("{model}", pretrained=True, num_classes=0{size}, pretrained_cfg_overlay=given)"""

_TRAINED = """            self.projection = self.project = nn.Linear({features}, {width})"""

_CONSTANT = """            generator, bound = torch.Generator().manual_seed({seed}), {features}**-0.5
            weight = torch.empty({width}, {features}).uniform_(-bound, bound, generator=generator)
            bias = torch.empty({width}).uniform_(-bound, bound, generator=generator)
            self.project = lambda features: functional.linear(features, weight, bias)"""

_RESIZE = """            images = functional.interpolate(images, size=({side}, {side}), mode="bilinear")
"""


def constants(body: Body, sha256: str) -> str:
    """Return the constants of the script: where the weights are, and their hash."""
    return CONSTANTS.format(library=body.library, sha256=sha256)


def extractor_source(extractor: PretrainedExtractor) -> str:
    """Return the lines that build the extractor.

    Raises:
        ValueError: If the library's own functions do not load the body's weights in this size.
    """
    name, plan = extractor.name, extractor.plan
    _, heads = without_values(name.body)
    if name.body.library == "torchvision":
        if plan.is_sized:
            raise ValueError(f"torchvision loads no weights of {name.body.model} for images of another size")
        body = _TORCHVISION.format(model=name.body.model, head=heads[0].rstrip("."))
    else:
        body = _TIMM.format(model=name.body.model, size=f", img_size={plan.side}" if plan.is_sized else "")
    width = {"features": plan.features, "width": name.projection}
    if not name.projection:
        projection = "            self.project = nn.Identity()"
    elif name.trains_projection:
        projection = _TRAINED.format(**width)
    else:
        projection = _CONSTANT.format(seed=seed_for(PROJECTION_SEED, "projection"), **width)
    places = [(place.module, place.channels, place.layout) for place in plan.places[: len(extractor.adapters)]]
    resize = _RESIZE.format(side=plan.side) if plan.side else ""
    return _SOURCE.format(
        bottleneck=BOTTLENECK, projection=projection, resize=resize, body=body, places=places, heads=heads
    )
