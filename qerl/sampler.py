"""The engine in the shape TRL calls it: weight sync and generation.

Decided here is what to sample from (the adapter under this step's noise) and with which seed. How
an engine does it is qerl.rollout's business, and what becomes of the completions the trainer's.
"""

from __future__ import annotations

from qerl import adapter
from qerl.config import TrainConfig
from qerl.noise import Noise
from qerl.rollout import Applied, Engine, Sampling


class Sampler:
    """What TRL calls its vLLM generation: sync_weights() and generate()."""

    def __init__(self, trainer, engine: Engine, config: TrainConfig, schedule):
        self.trainer, self.engine, self.schedule = trainer, engine, schedule
        self.seed = config.random_state
        # The whole distribution: under top-p or top-k mu is renormalized and the trainer's pi is
        # not, so that every ratio leans below 1 (qerl.config.command_line.NOT_OFFERED).
        self.sampling = Sampling(config.max_completion_length, config.temperature)
        self.applied = Applied(0.0, 0.0, 0)
        self.tokens = 0  # sampled since the sync
        self._draws = 0  # calls of generate since the sync

    def sync_weights(self) -> None:
        """Hand the adapter and this step's noise to the engine."""
        self.tokens = self._draws = 0
        with self.trainer.timed("time_sync_s"):
            self.applied = self.engine.sync(adapter.of_model(self.trainer.model), self._noise())

    def generate(self, prompts, images, num_generations, profiler=None):
        """TRL's contract: (prompt ids, completion ids, log-probabilities, their token ids)."""
        with self.trainer.timed("time_rollout_s"):
            drawn = self.engine.generate(prompts, self.sampling, seed=self._draw_seed())
            self.engine.sleep()
        ids = [completion.token_ids for completion in drawn]
        self.tokens += sum(map(len, ids))
        self._draws += 1
        logprobs = [[[value] for value in completion.logprobs] for completion in drawn]
        return prompts, ids, logprobs, [[[token] for token in row] for row in ids]

    def _step(self) -> int:
        return self.trainer.state.global_step + 1

    def _draw_seed(self) -> int:
        """A function of (seed, step, draw): a resumed run draws what it would have drawn."""
        return (self.seed * 1_000_003 + self._step() + (self._draws << 56)) % 2**63

    def _noise(self) -> Noise | None:
        if self.schedule is None:
            return None
        return Noise(self.seed, self._step(), self.schedule.sigma(self._step()))
