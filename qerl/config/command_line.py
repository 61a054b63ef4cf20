"""The command line of a training run: a flag for each field of TrainConfig, and nothing else.

Types and choices are refused here; whether the values make a run is qerl.config.rules' business.
"""

from __future__ import annotations

import argparse
import dataclasses
import typing

from qerl.config.flags import TrainConfig
from qerl.config.rules import kebab

# Flags of other trainers that would bias this one, refused with the reason.
NOT_OFFERED = {
    "--top-p": "training samples from the whole distribution. The log-probabilities of a sampler "
    "that leaves tokens out are renormalized and the trainer's are not, which biases the ratio "
    "between them; --temperature is known to both",
}
NOT_OFFERED |= dict.fromkeys(("--top-k", "--min-p"), NOT_OFFERED["--top-p"])


def parse(argv: list[str] | None = None) -> TrainConfig:
    """The configuration of a command line; argparse exits with status 2 on an unknown flag."""
    parser = argparse.ArgumentParser(
        prog="python -m qerl.train", description=TrainConfig.__doc__, allow_abbrev=False
    )
    types = typing.get_type_hints(TrainConfig)
    for field in dataclasses.fields(TrainConfig):
        _add_flag(parser, field, types[field.name])
    for name in NOT_OFFERED:
        parser.add_argument(name, action=_Refuse, help=argparse.SUPPRESS)
    return TrainConfig(**vars(parser.parse_args(argv)))


class _Refuse(argparse.Action):
    def __init__(self, option_strings, dest, **kwargs):
        super().__init__(option_strings, argparse.SUPPRESS, default=argparse.SUPPRESS, **kwargs)

    def __call__(self, parser, namespace, values, option_string=None):
        parser.error(f"{option_string} is not offered: {NOT_OFFERED[option_string]}")


def _add_flag(parser: argparse.ArgumentParser, field: dataclasses.Field, kind: type) -> None:
    name, default = kebab(field.name), field.default
    shown = f"{field.metadata['help']} (default: {default!r})"
    if kind is bool:
        parser.add_argument(
            f"--{name}", nargs="?", const=True, default=default, type=_bool, help=shown
        )
        parser.add_argument(
            f"--no-{name}", dest=field.name, action="store_false", help=argparse.SUPPRESS
        )
    else:
        choices = field.metadata["choices"]
        parser.add_argument(f"--{name}", type=kind, default=default, choices=choices, help=shown)


def _bool(text: str) -> bool:
    lowered = text.lower()
    if lowered not in ("true", "false", "1", "0", "yes", "no"):
        raise argparse.ArgumentTypeError(f"{text!r}: expected True or False")
    return lowered in ("true", "1", "yes")
