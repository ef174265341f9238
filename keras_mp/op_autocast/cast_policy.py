"""The policy of a region of `keras_mp.autocast` for each kind of operation, and the reason.

The policies began as the lists of TensorFlow's graph rewrite (`auto_mixed_precision_lists.h`). Its
operations are all here; where the policy is another one, the reason says why. Their names are those
of TensorFlow's lists; `promote` is PyTorch's. This module needs TensorFlow only.
"""

from typing import NamedTuple

from keras_mp.support import op_table

ALLOW = "allow"
INFER = "infer"
CLEAR = "clear"
PROMOTE = "promote"
DENY = "deny"
NONE = "none"

POLICIES = {
    ALLOW: "runs in 16 bits, whatever comes in",
    INFER: "computes; runs in 16 bits if what comes in was computed in 16 bits",
    CLEAR: "moves or selects numbers; runs as infer does",
    PROMOTE: "runs in float32; if 16-bit and float32 tensors meet in it, in float32 as well",
    DENY: "runs in float32",
    NONE: "is left alone",
}


class OpPolicy(NamedTuple):
    """The policy of a region for an operation.

    Attributes:
        policy: a key of `POLICIES`.
        why: the reason.
    """

    policy: str
    why: str


# The kinds of operations, by policy and reason.
_KINDS = {
    ALLOW: {
        "matrix products are what 16 bits make fast; sums are kept in float32 inside": (
            "matrix products"
        ),
        "convolutions are, too": "convolutions, padded convolutions",
        "a transposed convolution is this operation in the forward pass": "transposed convolutions",
    },
    INFER: {
        "at most doubles what comes in; fuses with the product before it": "additions",
        "bfloat16 only: in float16 the sum of many may overflow": "sums of tensors",
        "float16: only by a factor that is known to be at most 2, since products overflow": (
            "multiplications"
        ),
        "bfloat16 only: it adds up before it divides, which may overflow in float16": (
            "average pooling"
        ),
        "its statistics, scale and offset stay float32": "batch normalization",
        "bounded by what comes in, unless its slope is above 1": "leaky relu",
        "bounded by what comes in": "softsign",
        "on GPUs; on CPUs its 16-bit kernel is slower than the float32 one": (
            "exponential units, sigmoids"
        ),
    },
    CLEAR: {
        "one of the numbers that come in, or 0": (
            "relu, maxima over axes, maxima of two, max pooling, signs, selections"
        ),
        "the same numbers in other places": (
            "identities, identities without a gradient, reshapes, views, moves"
        ),
    },
    PROMOTE: {
        "compares float32, which the numbers of 16-bit operations are without loss": "comparisons",
        "squares overflow in float16, and differences of near numbers lose digits": (
            "squared differences"
        ),
        "overflows in float16, and magnifies what was rounded": "powers",
    },
    DENY: {
        "overflows in float16, and magnifies what was rounded": "exponentials, squares",
        "near 1 it is the digits that 16 bits leave out which count": "logarithms, log softmax",
        "sums many numbers": (
            "sums over axes, running sums, norms, products over axes, softmax, "
            "sparse matrix products"
        ),
        "a loss is a sum of logarithms": "cross entropies",
        "has exponentials and logarithms inside": "softplus",
        "its result is large where what comes in is small": (
            "divisions, divisions without NaN, reciprocals, roots"
        ),
        "the quotient of whole numbers above 256 is not theirs in 16 bits": (
            "divisions without remainder"
        ),
    },
    NONE: {
        "of the backward pass, which runs in the dtypes of the forward pass without being asked": (
            "gradients, gradients of biases, gradients of kernels"
        ),
        "only looks at numbers, and the program sees float32": (
            "tests, shapes, orders, identities that check"
        ),
        "rounds, and whole numbers above 256 are not all in bfloat16": "roundings",
        "makes new numbers": "fills",
        "carries what the program sees, and keeps its dtype for as long as it lives": (
            "loops, entries of frames, exits of frames, frames, identities of lists, "
            "lists of a loop, moves by index"
        ),
        "its result is float32 whatever comes in": "interpolations",
        "files keep what the program sees": "files",
        "a cell whose state would be 16-bit from one step to the next": "recurrent cells",
        "made by grappler, or not a part of TensorFlow": "fusions",
    },
}

ROWS: dict[str, OpPolicy] = {
    op: OpPolicy(policy, why)
    for policy, reasons in _KINDS.items()
    for why, kinds in reasons.items()
    for kind in kinds.split(", ")
    for op in op_table.BY_KIND[kind]
}

# Their results are at most 1, so that multiplying by one cannot overflow.
BOUNDED = op_table.ops("sigmoids", "softsign")

# The bfloat16 kernels took two to three times as long as the float32 ones.
SLOW_ON_CPU = op_table.ops("sigmoids", "exponential units")
WHY_SLOW_ON_CPU = "on CPUs its 16-bit kernel is slower than the float32 one"

# They add up before they divide, if they do, and the sum may be infinite in float16.
DENIED_IN_FLOAT16 = op_table.ops("sums of tensors", "average pooling")
WHY_NOT_IN_FLOAT16 = "adds up many numbers, which may overflow in float16"

# Their result counts as a variable if the input does.
SAME_WEIGHT = op_table.ops("identities", "reshapes", "views")
