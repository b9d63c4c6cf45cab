"""One short text for all parameters of a model: equal texts, equal bits."""

from __future__ import annotations

import hashlib

import torch

from sky_monarch.training.sharding import local_of, reshard

__all__ = ["parameters_digest"]


@torch.no_grad()  # type: ignore[untyped-decorator]
def parameters_digest(model: torch.nn.Module) -> str:
    """SHA-256 over names, shapes, dtypes and bytes of every parameter, as 64 hex digits.

    Of a sharded one this rank's shard counts: ranks of one group differ, a rank and its like in the other
    groups do not.
    """
    reshard(model)
    digest = hashlib.sha256()
    for name, param in model.named_parameters():
        digest.update(f"{name} {tuple(param.shape)} {param.dtype}\n".encode())
        flat = local_of(param.detach()).cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()
