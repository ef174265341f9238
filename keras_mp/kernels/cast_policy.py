"""The policy of an `autocast` region for each kind of operation, and the reason.

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
    ALLOW: "runs in 16 bits, whatever its inputs are",
    INFER: "computes; runs in 16 bits if its inputs were computed in 16 bits",
    CLEAR: "moves or selects numbers; runs as infer does",
    PROMOTE: "runs in float32, also if it gets 16-bit and float32 tensors",
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
        "16 bits make matrix products fast; their sums are float32 inside": ("matrix products"),
        "convolutions are, too": "convolutions, padded convolutions",
        "a transposed convolution is this operation in the forward pass": "transposed convolutions",
    },
    INFER: {
        "at most doubles its inputs; fuses with the product before it": "additions",
        "bfloat16 only: in float16 the sum of many may overflow": "sums of tensors",
        "float16: only by a factor that is known to be at most 2, since products overflow": (
            "multiplications"
        ),
        "bfloat16 only: it adds up before it divides, which may overflow in float16": (
            "average pooling"
        ),
        "its statistics, scale and offset stay float32": "batch normalization",
        "not larger than its input, unless its slope is above 1": "leaky relu",
        "on GPUs; on CPUs its 16-bit kernel is slower than the float32 one": (
            "exponential units, sigmoids"
        ),
    },
    CLEAR: {
        "returns one of its inputs, or 0": (
            "relu, maxima over axes, maxima of two, max pooling, signs, selections"
        ),
        "the same numbers in other places": (
            "identities, identities without a gradient, reshapes, views, moves"
        ),
    },
    PROMOTE: {
        "compares in float32, to which 16-bit numbers convert exactly": "comparisons",
        "squares overflow in float16, and differences of similar numbers lose digits": (
            "squared differences"
        ),
        "overflows in float16, and magnifies what was rounded": "powers",
    },
    DENY: {
        "overflows in float16, and magnifies what was rounded": "exponentials, squares",
        "near 1 the result depends on digits that 16 bits leave out": "logarithms, log softmax",
        "adds up many numbers": (
            "sums over axes, running sums, norms, products over axes, softmax, "
            "sparse matrix products"
        ),
        "a loss is a sum of logarithms": "cross entropies",
        "has exponentials and logarithms inside": "softplus",
        "its gradient squares its input, which overflows in float16": "softsign",
        "small inputs give large results": ("divisions, divisions without NaN, reciprocals, roots"),
        "rounding integers above 256 to bfloat16 may change the quotient": (
            "divisions without remainder"
        ),
    },
    NONE: {
        "part of the backward pass, which always runs in the dtypes of the forward pass": (
            "gradients, gradients of biases, gradients of kernels"
        ),
        "returns no new floating-point numbers, and the program sees float32": (
            "tests, shapes, orders, identities that check"
        ),
        "rounds to integers, and bfloat16 cannot hold all of those above 256": "roundings",
        "creates new tensors": "fills",
        "carries tensors that the program sees, in float32": (
            "loops, entries of frames, exits of frames, frames, identities of lists, "
            "lists of a loop, moves by index"
        ),
        "returns float32 whatever its input is": "interpolations",
        "files store what the program sees": "files",
        "the state of the cell would be rounded to 16 bits in each step": "recurrent cells",
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
BOUNDED = op_table.ops("sigmoids")

# The bfloat16 kernels took two to three times as long as the float32 ones.
SLOW_ON_CPU = op_table.ops("sigmoids", "exponential units")
WHY_SLOW_ON_CPU = "on CPUs its 16-bit kernel is slower than the float32 one"

# They add up before they divide, if they do, and the sum may be infinite in float16.
DENIED_IN_FLOAT16 = op_table.ops("sums of tensors", "average pooling")
WHY_NOT_IN_FLOAT16 = "adds up many numbers, which may overflow in float16"
