"""Host copies for a checkpoint on a GPU: pinned, and unaffected by later device work."""

from __future__ import annotations

import torch

from pantheraml.checkpoint.host_copy import HostCopies


def test_host_copy_is_unaffected_by_later_writes() -> None:
    device = torch.device("cuda")
    copies, live = HostCopies(device), torch.randn(4096, 4096, device=device)
    for _ in range(3):
        expected = live.sum(dim=1, dtype=torch.float64).cpu()
        copy = copies.take("weight", live)
        live.add_(1)  # queued behind the copy
        copies.wait()
        assert copy.is_pinned()
        torch.testing.assert_close(copy.to(device).sum(dim=1, dtype=torch.float64).cpu(), expected, rtol=0, atol=0)
