"""The rows of a rollout: groups that teach nothing, their replacement, passes of similar length.

The tensors of dynamic sampling (DAPO, arXiv 2503.14476, section 3.2) and of gradient accumulation;
qerl.trainer samples and trains. A batch is the dictionary of tensors that TRL makes of a rollout,
its rows group after group; a pass is a part of one that goes through the model at once.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad


def without_variance(rewards_BF: torch.Tensor, size: int) -> torch.Tensor:
    """Whether all completions of a group earned the same: [B / size], bool.

    rewards_BF holds what each of F functions gave, NaN for no verdict; a completion earns their
    sum, and one without any verdict does not count. Equality is exact, as rounding in a group's
    mean and deviation is not: TRL's advantage of eight equal rewards of 0.3 is 3e-4, which Adam
    would take for a gradient like any other.
    """
    earned_B = rewards_BF.nansum(1)
    unknown_B = rewards_BF.isnan().all(1)
    highest = earned_B.masked_fill(unknown_B, -torch.inf).view(-1, size).amax(1)
    lowest = earned_B.masked_fill(unknown_B, torch.inf).view(-1, size).amin(1)
    return ~(highest > lowest)


def rows_of(groups: torch.Tensor, size: int) -> torch.Tensor:
    """The rows [n * size] of these groups [n]."""
    return (groups[:, None] * size + torch.arange(size, device=groups.device)).flatten()


def replace(batch: dict, fresh: dict, rows: torch.Tensor, fresh_rows: torch.Tensor) -> None:
    """Put rows of `fresh` in place of as many rows of `batch`, and count the tokens anew."""
    for key, values in batch.items():
        if values.dim() == 0:
            continue
        width = max(values.shape[-1], fresh[key].shape[-1])
        values, others = (_widen(t, width, key.startswith("prompt")) for t in (values, fresh[key]))
        values[rows] = others[fresh_rows]
        batch[key] = values
    batch["num_items_in_batch"] = batch["completion_mask"].sum()


def _widen(values: torch.Tensor, width: int, left: bool) -> torch.Tensor:
    """[B, T] with zeros up to `width`, at the left for prompts; [B] as it is."""
    if values.dim() == 1:
        return values
    missing = width - values.shape[1]
    return pad(values, (missing, 0) if left else (0, missing))


def teaches(batch: dict, kl: bool) -> torch.Tensor:
    """Whether a row has a gradient [B], bool: tokens in the loss, and an advantage or a KL."""
    return batch["completion_mask"].any(1) & ((batch["advantages"] != 0) | kl)


def reordered(passes: list[dict], kl: bool) -> list[dict]:
    """The rows of `passes` dealt to passes anew: those without a gradient first, then by length.

    So the rows of a pass are of similar length, and in most passes all have a gradient or none.
    """
    rows = {key: torch.cat([one[key] for one in passes]) for key, v in passes[0].items() if v.dim()}
    length_B = rows["completion_mask"].sum(1)
    key_B = length_B + teaches(rows, kl) * (length_B.max() + 1)
    chosen = key_B.argsort(stable=True).split(len(passes[0]["prompt_ids"]))
    return [
        one | {key: values[which] for key, values in rows.items()}
        for one, which in zip(passes, chosen, strict=True)
    ]


def span(mask_BT: torch.Tensor, kept: int) -> tuple[int, int]:
    """The columns [start, end) that some row attends to, and one of the last `kept` at least."""
    columns = mask_BT.any(0).nonzero()
    first_kept = mask_BT.shape[1] - kept
    return min(int(columns[0]), first_kept), max(int(columns[-1]), first_kept) + 1
