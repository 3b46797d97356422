"""The command line."""

import sys
from collections.abc import Callable

import click


def main():
    pass
