"""How a language model is asked: the protocol and, where answers are sampled, the sampling."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lapcli.runtime.errors import UsageError

Protocol = Literal["paper", "harness"]
SEED = 1234  # lm-eval's, so that few-shot examples are the ones that it draws
_SAMPLING = ("samples", "temperature", "top_k", "max_new_tokens")
REASON = (
    "the paper gives neither temperature nor top-k nor length; the defaults 1.0 and 50 are nanochat's own for pass@k, "
    "512 tokens its evaluation's; at temperature 0 ten samples would be ten copies"
)


@dataclass(frozen=True)
class Settings:
    protocol: Protocol
    samples: int = 10
    temperature: float = 1.0
    top_k: int | None = 50
    max_new_tokens: int = 512
    seed: int = SEED

    def to_dict(self) -> dict[str, Any]:
        """As far as they have a say: lm-eval's tasks bring their own sampling."""
        if self.protocol == "harness":
            return {"seed": self.seed}
        return {name: getattr(self, name) for name in (*_SAMPLING, "seed")}


def read_settings(objective: str, options: Mapping[str, Any]) -> Settings:
    is_chat = objective == "chat"
    protocol = options.get("protocol", "paper" if is_chat else "harness")
    if protocol not in ("paper", "harness"):
        raise UsageError(f"--protocol takes paper or harness, got {str(protocol)[:40]!r}")
    if protocol == "paper" and not is_chat:
        raise UsageError(
            f"--protocol paper asks in chat form, which a run of {objective} has not learned; use --protocol harness, "
            "or the run of `lap sft`"
        )
    given = {name: options[name] for name in (*_SAMPLING, "seed") if name in options}
    unused = [name for name in _SAMPLING if name in given]
    if protocol == "harness" and unused:
        raise UsageError(
            f"--{unused[0].replace('_', '-')} means nothing with --protocol harness, whose tasks bring their own "
            "sampling; leave it out, or use --protocol paper"
        )
    settings = Settings(protocol, **given)
    if settings.temperature == 0 and settings.samples > 1:
        raise UsageError(
            f"at --temperature 0 all {settings.samples} samples of a question are the same; use --samples 1, or a "
            "temperature above 0"
        )
    return settings
