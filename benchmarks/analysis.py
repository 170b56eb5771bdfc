"""Cost of the analyses: eigenvalues against singular values, memory for growing data, and real sizes.

Parts: eigenvalues, anova, vit, gpt; by default all. LAPACK runs on one thread.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from measure import alternate, mebibytes, peak_rss

TARGET_SPEED, TARGET_ERROR = 3.0, 1e-6
SEQUENCES, TOKENS, WIDTH, AT_ONCE = 512, 197, 768, 32


def bench_eigenvalues() -> None:
    """512 sequences of 197 tokens and width 768, in float64: batched Gram matrices against svdvals of each sequence."""
    from lapcli.measures.tokens import eigenvalues

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    decay = torch.arange(1, WIDTH + 1, dtype=torch.float64) ** -0.7
    tokens_BTD = torch.randn(SEQUENCES, TOKENS, WIDTH, dtype=torch.float64, generator=generator) * decay
    results: dict[str, torch.Tensor] = {}

    def gram() -> None:
        results["gram"] = torch.cat([eigenvalues(part) for part in tokens_BTD.split(AT_ONCE)])

    def singular() -> None:
        centred = (x_TD - x_TD.mean(dim=0) for x_TD in tokens_BTD)
        results["svdvals"] = torch.stack([torch.linalg.svdvals(x_TD).square() for x_TD in centred])

    seconds = alternate({"gram": gram, "svdvals": singular}, rounds=3, warmup=0)
    error = ((results["gram"] - results["svdvals"]).abs().amax(dim=1) / results["svdvals"][:, 0]).max()
    print(f"eigenvalues of {SEQUENCES} sequences, {TOKENS} x {WIDTH}, float64, one thread")
    print(f"  Gram matrices {seconds['gram']:.2f} s, svdvals of each {seconds['svdvals']:.2f} s: ", end="")
    print(f"{seconds['svdvals'] / seconds['gram']:.1f} times faster (target: {TARGET_SPEED:g})")
    print(f"  largest difference {float(error):.1e} of a sequence's largest eigenvalue (target: {TARGET_ERROR:g})")


def anova_peak(batches: int) -> None:
    """Streams batches of 2,048 tokens of width 256 in 4,096 classes, and prints the process's peak memory."""
    from lapcli.analysis.measurements.anova import add_tokens, shares
    from lapcli.analysis.statistics import ClassMoments

    moments = ClassMoments(4096, 256)
    generator = torch.Generator().manual_seed(0)
    for _ in range(batches):
        tokens_BTD = torch.randn(8, 256, 256, dtype=torch.float64, generator=generator)
        add_tokens(moments, tokens_BTD, torch.randint(4096, (8, 256), generator=generator), by_token=True)
    assert shares(moments, by_token=True).values["examples"]
    print(peak_rss())


def bench_anova() -> None:
    """Each size runs in a separate process, because a peak cannot be reset."""
    peaks = {batches: _in_a_process("anova_peak", batches) for batches in (30, 300)}
    print("anova, 4,096 classes of width 256 (8 MiB of class means); target: the same peak for ten times the tokens")
    for batches, peak in peaks.items():
        print(f"  {batches * 2048:>9,} tokens: peak {mebibytes(peak)}")
    print(f"  difference {mebibytes(peaks[300] - peaks[30])}")


def _in_a_process(function: str, argument: int) -> int:
    code = f"import analysis; analysis.{function}({argument})"
    told = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True)
    if told.returncode:
        raise SystemExit(told.stderr)
    return int(told.stdout.split()[-1])


def _everything(model, classes: int) -> None:  # type: ignore[no-untyped-def]
    """All applicable measurements, with figures, in one pass; prints time and peak memory of this process."""
    from lapcli.analysis.analyze import analyze, write_analysis
    from lapcli.analysis.measurement import Settings

    before, start = peak_rss(), time.perf_counter()
    analyses = analyze(None, [model], Settings())
    with tempfile.TemporaryDirectory() as place:
        for analysis in analyses:
            write_analysis(analysis, Path(place))
    run = analyses[0].runs[0]
    print(f"  {', '.join(analysis.what for analysis in analyses)}")
    size = f"{run.sequences} sequences, {run.tokens:,} tokens, {classes:,} classes"
    peak = f"peak memory {mebibytes(peak_rss())} ({mebibytes(before)} before)"
    print(f"  {size}: {time.perf_counter() - start:.0f} s, {peak}")


def bench_vit() -> None:
    """ViT-B with random weights, 197 tokens, half of its heads Laplacian, on the digits resized to 224 pixels."""
    from lapcli.analysis.analyzed_models import STOCK_GIVES, AnalyzedModel, OpenedModel
    from lapcli.analysis.examples import DataOrigin, ImageExamples
    from lapcli.data.images.sources import Digits
    from lapcli.measures.capture import anatomy_of
    from lapcli.models.vit import build_vit
    from lapcli.recipe.vision import ImageFiles, ViTModel

    def opened() -> OpenedModel:
        model = build_vit(ViTModel(classes=10, laplacian_heads=6), 0)
        source = ImageFiles(train="builtin", validation=0.2)
        origin = DataOrigin("the digits", "", "validation")
        device = torch.device("cpu")
        examples = ImageExamples(Digits(), source, 224, origin, limit=32, batch=8, device=device)
        return OpenedModel(anatomy_of(model), examples)

    print("every analysis of a ViT-B, 12 layers, 197 tokens, float32, random weights")
    _everything(AnalyzedModel("ViT-B", "untrained", 0, None, "classification", STOCK_GIVES, opened), 10)


class _RandomText:
    """A few sequences of random tokens, with an untrained tokenizer."""

    by_token = True

    def __init__(self, sequences: int, context: int, vocab: int) -> None:
        from lapcli.analysis.examples import DataOrigin

        self.origin = DataOrigin("random tokens", "", "validation")
        self.classes = [str(number) for number in range(vocab)]
        # Distributed like words: a few are frequent, most are rare.
        self._tokens = (np.random.default_rng(0).zipf(1.2, (sequences, context + 1)) % vocab).astype(np.int64)

    def __len__(self) -> int:
        return len(self._tokens)

    def batches(self):  # type: ignore[no-untyped-def]
        from lapcli.measures.capture import Batch

        for number, row in enumerate(self._tokens):
            tokens = torch.from_numpy(row)[None]
            yield Batch(tokens[:, :-1], tokens[:, 1:], number)

    def class_counts(self) -> np.ndarray:
        return np.bincount(self._tokens[:, 1:].reshape(-1), minlength=len(self.classes))


def bench_gpt() -> None:
    """The paper's 20 layers at context 2048 with random weights, two sequences; mostly what `updates` takes."""
    from lapcli.analysis.analyzed_models import AnalyzedModel, OpenedModel
    from lapcli.measures.capture import anatomy_of
    from lapcli.models.gpt import GPT, GPTConfig
    from lapcli.recipe.schema import LANGUAGE

    vocab = 65_536

    def opened() -> OpenedModel:
        model = GPT(GPTConfig(layers=20, heads=10, width=1280, vocab=vocab, laplacian_heads=5))
        with torch.no_grad():
            for block in model.blocks:  # they start at zero, and every layer would be the same
                block.attn.out.weight.normal_(std=0.01)  # type: ignore[union-attr, operator]
                block.mlp.down.weight.normal_(std=0.01)  # type: ignore[union-attr, operator]
        return OpenedModel(anatomy_of(model), _RandomText(2, 2048, vocab))  # type: ignore[arg-type]

    print("every analysis of the 561M GPT, 20 layers, context 2048, float32, random weights (2,140 MiB of them)")
    _everything(AnalyzedModel("GPT", "untrained", 0, None, "language_model", frozenset({LANGUAGE}), opened), vocab)


PARTS = {
    "eigenvalues": bench_eigenvalues,
    "anova": bench_anova,
    "vit": bench_vit,
    "gpt": bench_gpt,
}

if __name__ == "__main__":
    if len(sys.argv) > 1:
        for part in sys.argv[1:]:
            PARTS[part]()
    else:
        for part in PARTS:  # a process each, so that a peak is of one part
            sys.stdout.flush()
            subprocess.run([sys.executable, __file__, part], check=True)
