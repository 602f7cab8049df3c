"""The moving average of a model's weights, ``--store-ema``."""

import functools


def skipping_what_is_no_number(init):
    """For ``EMA.__init__``: takes the newest of what is not floating-point, such as ``dictionary_sha256``."""

    @functools.wraps(init)
    def wrapped(self, model, config, device=None, skip_keys=None):
        integers = {name for name, value in model.state_dict().items() if not value.is_floating_point()}
        init(self, model, config, device, integers | set(skip_keys or ()))

    return wrapped
