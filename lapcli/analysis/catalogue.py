"""The measurements of `lap analyze`: what each is called, means, takes and fits. No torch in here, for quick help."""

from dataclasses import dataclass

LANGUAGE, IMAGES, LABELLED = "language", "images", "images with classes"


@dataclass(frozen=True)
class Entry:
    help: str  # one line
    definition: str  # in words, for the output
    options: tuple[str, ...]  # of its own, beside those that all share
    kinds: tuple[str, ...]  # what it fits
    layers: str  # which, where --layer does not say
    norm: str | None = "before"  # tokens before or after the model's last norm; None: it has a place of its own


_TOKENS = ("layer", "tokens", "norm")
CATALOGUE: dict[str, Entry] = {
    "spectrum": Entry(
        "Eigenvalues of the centred tokens of a sequence, and k_alpha.",
        "Eigenvalues of X~^T X~ in each sequence, X~ its tokens minus their mean: mean and standard deviation by rank "
        "over sequences. k_alpha: the fewest leading eigenvalues that reach the share alpha of their sum, averaged "
        "over sequences.",
        _TOKENS,
        (LANGUAGE, IMAGES, LABELLED),
        "last",
    ),
    "anova": Entry(
        "Shares of the variance: within sequence, within class, between classes.",
        "Variance of the tokens about the mean of their sequence (images only), of sequence means about the mean of "
        "their class, and of class means about their mean, as shares of the sum. In language models a token is an "
        "example of the class of its next token. Averages are nested, every class weighs the same; `by_example` "
        "weighs classes by their examples.",
        (*_TOKENS, "min_count"),
        (LANGUAGE, LABELLED),
        "last",
    ),
    "cossim": Entry(
        "Mean pairwise cosine similarity of a sequence's tokens, by layer.",
        "Cosine similarity of two different tokens of a sequence, averaged over all pairs and over sequences, of the "
        "output of each block.",
        _TOKENS,
        (LANGUAGE, IMAGES, LABELLED),
        "all",
    ),
    "snr": Entry(
        "Mean-to-spread ratio after the norm before the MLP, by layer.",
        "Length of the mean token of a sequence over the root of the mean squared distance from it, averaged over "
        "sequences, of the output of the norm before the MLP.",
        ("layer", "tokens"),
        (LANGUAGE, IMAGES, LABELLED),
        "all",
        None,
    ),
    "collapse": Entry(
        "Neural collapse, NC1 to NC4.",
        "Class means average all tokens of all examples of a class; M' are the means minus their mean, W the rows of "
        "the classifier, C classes, an example's feature h is the mean of its tokens. NC1 = tr(S_W S_B^+), S_W the "
        "covariance of h about its class mean, S_B that of the class means. NC2 equinorm = std / mean of the lengths "
        "(std with C - 1). NC2 equiangular = mean over pairs of |cosine + 1/(C-1)|. NC3 = |W^T/|W| - M'/|M'||^2. NC4 = "
        "share of examples whose class by the logits is not that of the nearest class mean. `centred` takes M' for "
        "the means in NC2, `as_printed` the means themselves, as the paper writes.",
        _TOKENS,
        (LABELLED,),
        "last",
        "after",
    ),
    "simplex": Entry(
        "Tokens on the simplex of three classes (Algorithm 1).",
        "Algorithm 1: W' are the three rows of the classifier, each of length 1; U S V^T its thin SVD; A the map of "
        "the three corners to an equilateral triangle. Plotted is A U V^T x of tokens x of the three classes.",
        (*_TOKENS, "center", "classes"),
        (LABELLED,),
        "last",
        "after",
    ),
    "pca": Entry(
        "Tokens on their top two principal components, coloured by class, by layer.",
        "Tokens of a few classes, a seeded sample, minus their mean, on the two directions of largest variance.",
        (*_TOKENS, "classes"),
        (LANGUAGE, LABELLED),
        "spread",
    ),
    "updates": Entry(
        "What each head adds: along the mean, towards it, and the variance.",
        "A head adds u_t to token x_t of the residual stream; m_t is the mean of the tokens weighted by its attention. "
        "Cosine of u_t with m_t and with m_t - x_t, averaged over tokens; variance_change: what adding u_t alone does "
        "to the variance within the sequence, as a share of it.",
        ("layer",),
        (LANGUAGE, IMAGES, LABELLED),
        "all",
        None,
    ),
    "features": Entry(
        "Top three components of an image's patches as colours.",
        "Patch tokens of one image, minus their mean, on their top three principal components, each divided by its "
        "deviation; sigmoid(2 z) is red, green and blue. The largest entry of a component is positive.",
        ("layer", "norm", "images", "overlay"),
        (IMAGES, LABELLED),
        "last",
        "after",
    ),
}


def fitting(kind: str) -> list[str]:
    return [name for name, entry in CATALOGUE.items() if kind in entry.kinds]
