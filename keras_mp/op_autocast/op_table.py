"""Which operations run in 16 bits in a region of `keras_mp.autocast`, and why: all of it is data.

The lists began as those of TensorFlow's graph rewrite (`auto_mixed_precision_lists.h`), which
knows four verdicts. Its operations are all here; where the verdict is another one, the reason says
why. This module imports nothing.
"""

from typing import NamedTuple

ALLOW = "allow"
INFER = "infer"
CLEAR = "clear"
PROMOTE = "promote"
DENY = "deny"
APART = "apart"

VERDICTS = {
    ALLOW: "runs in 16 bits, whatever comes in",
    INFER: "computes; runs in 16 bits if what comes in was computed in 16 bits",
    CLEAR: "moves or selects numbers; as infer",
    PROMOTE: "runs in float32; if 16-bit and float32 tensors meet in it, in float32 as well",
    DENY: "runs in float32",
    APART: "is left alone",
}


class Row(NamedTuple):
    """What the table says of an operation.

    Attributes:
        verdict: a key of `VERDICTS`.
        why: the reason.
    """

    verdict: str
    why: str


_TABLE: dict[str, dict[str, str]] = {
    ALLOW: {
        "matrix products are what 16 bits make fast; sums are kept in float32 inside": (
            "MatMul BatchMatMul BatchMatMulV2 Einsum"
        ),
        "convolutions are, too": "Conv2D Conv3D DepthwiseConv2dNative FusedPadConv2D",
        "a transposed convolution is this operation in the forward pass": (
            "Conv2DBackpropInput Conv3DBackpropInput Conv3DBackpropInputV2 "
            "DepthwiseConv2dNativeBackpropInput"
        ),
    },
    INFER: {
        "at most doubles what comes in; fuses with the product before it": (
            "Add AddV2 Sub BiasAdd BiasAddV1"
        ),
        "bfloat16 only: in float16 the sum of many may overflow": "AddN",
        "float16: only by a factor that is known to be at most 2, since products overflow": "Mul",
        "bfloat16 only: it adds up before it divides, which may overflow in float16": (
            "AvgPool AvgPool3D"
        ),
        "its statistics, scale and offset stay float32": "FusedBatchNormV2 FusedBatchNormV3",
        "bounded by what comes in, unless its slope is above 1": "LeakyRelu",
        "bounded by what comes in": "Softsign",
        "on GPUs; on CPUs its 16-bit kernel is slower than the float32 one": (
            "Elu Selu Tanh Sigmoid Erf Erfc"
        ),
    },
    CLEAR: {
        "one of the numbers that come in, or 0": (
            "Relu Relu6 Max Min Maximum Minimum MaxPool MaxPoolV2 MaxPool3D ClipByValue Neg Abs "
            "Select SelectV2"
        ),
        "the same numbers in other places": (
            "BatchToSpace BatchToSpaceND BroadcastTo Concat ConcatV2 DepthToSpace EnsureShape "
            "ExpandDims Gather GatherNd GatherV2 Identity MirrorPad Pack Pad PadV2 PreventGradient "
            "Reshape ResizeNearestNeighbor Reverse ReverseSequence ReverseV2 Roll Slice Snapshot "
            "SpaceToBatch SpaceToBatchND SpaceToDepth Split SplitV Squeeze StopGradient "
            "StridedSlice Tile Transpose Unpack"
        ),
    },
    PROMOTE: {
        "compares float32, which the numbers of 16-bit operations are without loss": (
            "Equal NotEqual Less LessEqual Greater GreaterEqual ApproximateEqual"
        ),
        "squares overflow in float16, and differences of near numbers lose digits": (
            "SquaredDifference"
        ),
        "overflows in float16, and magnifies what was rounded": "Pow",
    },
    DENY: {
        "overflows in float16, and magnifies what was rounded": "Exp Expm1 Square",
        "near 1 it is the digits that 16 bits leave out which count": "Log Log1p LogSoftmax",
        "sums many numbers": (
            "Sum Mean Prod L2Loss Softmax Cumsum Cumprod SparseTensorDenseMatMul SegmentSum "
            "SegmentMean UnsortedSegmentSum EuclideanNorm"
        ),
        "a loss is a sum of logarithms": (
            "SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits"
        ),
        "has exponentials and logarithms inside": "Softplus",
        "of what is small it becomes large": "Inv Reciprocal RealDiv Rsqrt Sqrt",
        "the quotient of whole numbers above 256 is not theirs in 16 bits": "FloorDiv",
    },
    APART: {
        "of the backward pass, which runs in the dtypes of the forward pass without being asked": (
            "AvgPool3DGrad AvgPoolGrad BiasAddGrad Conv2DBackpropFilter Conv3DBackpropFilter "
            "Conv3DBackpropFilterV2 DepthwiseConv2dNativeBackpropFilter EluGrad "
            "FusedBatchNormGradV2 FusedBatchNormGradV3 LeakyReluGrad MaxPool3DGrad "
            "MaxPool3DGradGrad MaxPoolGrad MaxPoolGradGrad MaxPoolGradGradV2 MaxPoolGradV2 "
            "MirrorPadGrad Relu6Grad ReluGrad ResizeNearestNeighborGrad SeluGrad SigmoidGrad "
            "SoftplusGrad SoftsignGrad StridedSliceGrad TanhGrad CudnnRNNBackprop "
            "CudnnRNNBackpropV2 CudnnRNNBackpropV3 BlockLSTMGrad BlockLSTMGradV2 GRUBlockCellGrad "
            "LSTMBlockCellGrad"
        ),
        "only looks at numbers, and what is visible is float32": (
            "ArgMax ArgMin CheckNumerics IsFinite IsInf IsNan OnesLike Rank Shape ShapeN Sign Size "
            "TopK TopKV2 Where ZerosLike"
        ),
        "rounds, and whole numbers above 256 are not all in bfloat16": "Ceil Floor Round",
        "makes new numbers": "Fill OneHot",
        "carries what is visible, and keeps its dtype for as long as it lives": (
            "Enter Exit Merge NextIteration Switch While StatelessWhile IdentityN TensorListConcat "
            "TensorListConcatLists TensorListConcatV2 TensorListGather TensorListGetItem "
            "TensorListPopBack TensorListPushBack TensorListPushBackBatch TensorListFromTensor "
            "TensorListScatter TensorListScatterV2 TensorListScatterIntoExistingList "
            "TensorListSetItem TensorListSplit TensorListStack DynamicPartition DynamicStitch "
            "ScatterNd"
        ),
        "its result is float32 whatever comes in": "ResizeBilinear",
        "files keep what is visible": "SaveV2",
        "a cell whose state would be 16-bit from one step to the next": (
            "BlockLSTM BlockLSTMV2 GRUBlockCell LSTMBlockCell CudnnRNN CudnnRNNV2 CudnnRNNV3"
        ),
        "made by grappler, or not a part of TensorFlow": (
            "_FusedBatchNormEx FusedConv2DBiasActivation FusedSparseConvGpuV2 Mha MhaV2 Tmlp "
            "TmlpV2 TmlpV3 Pmlp FastUnsortedSegmentMax VoxelMax"
        ),
    },
}

ROWS: dict[str, Row] = {
    op: Row(verdict, why)
    for verdict, groups in _TABLE.items()
    for why, ops in groups.items()
    for op in ops.split()
}

# Their results are at most 1, so that multiplying by one cannot overflow.
BOUNDED = frozenset(("Sigmoid", "Tanh", "Softsign", "Erf"))

# The bfloat16 kernels took two to three times as long as the float32 ones.
SLOW_ON_CPU = frozenset(("Elu", "Selu", "Tanh", "Sigmoid", "Erf", "Erfc"))
WHY_SLOW_ON_CPU = "on CPUs its 16-bit kernel is slower than the float32 one"

# In float16 they add up, before they divide if they do, what may be infinite then.
SUMS_IN_FLOAT16 = frozenset(("AddN", "AvgPool", "AvgPool3D"))
WHY_NOT_IN_FLOAT16 = "adds up many numbers, which may overflow in float16"

# What they make of a variable's value is still as good as the variable.
VIEWS = frozenset(("EnsureShape", "ExpandDims", "Identity", "Reshape", "Slice")) | frozenset(
    ("Squeeze", "StridedSlice", "Transpose")
)

# Where the gradient of an operation needs a kernel of another one.
GRADIENTS = {
    "Conv2D": ("Conv2DBackpropInput", "Conv2DBackpropFilter"),
    "Conv2DBackpropInput": ("Conv2D", "Conv2DBackpropFilter"),
    "Conv3D": ("Conv3DBackpropInputV2", "Conv3DBackpropFilterV2"),
    "Conv3DBackpropInputV2": ("Conv3D", "Conv3DBackpropFilterV2"),
    "DepthwiseConv2dNative": (
        "DepthwiseConv2dNativeBackpropInput",
        "DepthwiseConv2dNativeBackpropFilter",
    ),
    "FusedBatchNormV3": ("FusedBatchNormGradV3",),
    "FusedBatchNormV2": ("FusedBatchNormGradV2",),
    "AvgPool": ("AvgPoolGrad",),
    "AvgPool3D": ("AvgPool3DGrad",),
    "MaxPool": ("MaxPoolGrad",),
    "MaxPool3D": ("MaxPool3DGrad",),
    "LeakyRelu": ("LeakyReluGrad",),
    "Relu": ("ReluGrad",),
    "Relu6": ("Relu6Grad",),
    "Softsign": ("SoftsignGrad",),
    "Elu": ("EluGrad",),
    "Selu": ("SeluGrad",),
    "Tanh": ("TanhGrad",),
    "Sigmoid": ("SigmoidGrad",),
    "BiasAdd": ("BiasAddGrad",),
    "StridedSlice": ("StridedSliceGrad",),
    "MirrorPad": ("MirrorPadGrad",),
    "ResizeNearestNeighbor": ("ResizeNearestNeighborGrad",),
}
