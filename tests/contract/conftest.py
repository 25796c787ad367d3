"""What tests of Megatron's options share."""

import argparse

import pytest


@pytest.fixture(scope="session")
def actions():
    """Megatron's options by destination."""
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return {action.dest: action for action in parser._actions}
