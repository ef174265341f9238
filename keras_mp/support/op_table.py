"""TensorFlow's operations by their kinds; each operation is here once.

Other modules decide by kind: the dtype of an operation in a region of `autocast`
(`kernels/cast_policy.py`), and which operations count as computations, sums or divisions. This
module is data only.
"""

from keras_mp.support import variable_ops

_TABLE = {
    # Products and convolutions.
    "matrix products": "MatMul BatchMatMul BatchMatMulV2 Einsum",
    "matrix products into another dtype": "BatchMatMulV3",
    "convolutions": "Conv2D Conv3D DepthwiseConv2dNative",
    "padded convolutions": "FusedPadConv2D",
    "transposed convolutions": (
        "Conv2DBackpropInput Conv3DBackpropInput Conv3DBackpropInputV2 "
        "DepthwiseConv2dNativeBackpropInput"
    ),
    "transposed convolutions to the shape of a tensor": "Conv2DBackpropInputV2",
    "gradients of kernels": (
        "Conv2DBackpropFilter Conv2DBackpropFilterV2 Conv3DBackpropFilter Conv3DBackpropFilterV2 "
        "DepthwiseConv2dNativeBackpropFilter"
    ),
    "sparse matrix products": "SparseTensorDenseMatMul",
    # Sums and other reductions.
    "sums over axes": "Sum Mean SegmentSum SegmentMean UnsortedSegmentSum",
    "running sums": "Cumsum",
    "sums of tensors": "AddN",
    "gradients of biases": "BiasAddGrad",
    "norms": "L2Loss EuclideanNorm",
    "products over axes": "Prod Cumprod",
    "maxima over axes": "Max Min",
    "average pooling": "AvgPool AvgPool3D",
    "max pooling": "MaxPool MaxPoolV2 MaxPool3D",
    # Elementwise work.
    "additions": "Add AddV2 Sub BiasAdd BiasAddV1",
    "multiplications": "Mul",
    "squared differences": "SquaredDifference",
    "squares": "Square",
    "powers": "Pow",
    "other functions that 16 bits end": (
        "Acos Acosh Asin Asinh Atan Atan2 Atanh Cos Cosh Digamma Erfinv Lgamma Ndtri Polygamma Sin "
        "Sinh Tan Xlog1py Xlogy Zeta Betainc Igamma Igammac BesselI0e BesselI1e "
        "LogMatrixDeterminant Cholesky MatrixDeterminant MatrixInverse MatrixSolve "
        "MatrixTriangularSolve Qr SelfAdjointEigV2 Svd Lu MatrixExponential MatrixSquareRoot "
        "CumulativeLogsumexp SegmentProd UnsortedSegmentProd FloorMod Mod TruncateDiv "
        "AdjustContrastv2 AdjustHue AdjustSaturation HSVToRGB RGBToHSV LRN LinSpace Range "
        "ResizeArea ResizeBicubic ScaleAndTranslate Multinomial StatelessMultinomial "
        "NonMaxSuppressionV3 NonMaxSuppressionV4 NonMaxSuppressionV5 HistogramFixedWidth "
        "DenseBincount SparseBincount RaggedBincount BesselI0 BesselI1 BesselJ0 BesselJ1 BesselK0 "
        "BesselK0e BesselK1 BesselK1e BesselY0 BesselY1 Cross AccumulateNV2 SegmentSumV2 "
        "SegmentProdV2 SparseReduceSum SparseReduceSumSparse SparseSegmentSum SparseSegmentMean "
        "SparseSegmentSqrtN SparseSegmentSumWithNumSegments SparseSegmentMeanWithNumSegments "
        "SparseSegmentSqrtNWithNumSegments SparseDenseCwiseDiv SparseSoftmax "
        "ImageProjectiveTransformV2 ImageProjectiveTransformV3"
    ),
    "divisions": "RealDiv Div Xdivy",
    "divisions without NaN": "DivNoNan",
    "divisions without remainder": "FloorDiv",
    "reciprocals": "Inv Reciprocal Rsqrt",
    "roots": "Sqrt",
    "exponentials": "Exp Expm1",
    "logarithms": "Log Log1p",
    "maxima of two": "Maximum Minimum ClipByValue",
    "selections": "Select SelectV2",
    "signs": "Neg Abs",
    "roundings": "Ceil Floor Round",
    "comparisons": "Equal NotEqual Less LessEqual Greater GreaterEqual ApproximateEqual",
    # Activations, normalizations, losses.
    "relu": "Relu Relu6",
    "leaky relu": "LeakyRelu",
    "softsign": "Softsign",
    "sigmoids": "Tanh Sigmoid Erf",
    "exponential units": "Elu Selu Erfc",
    "softplus": "Softplus",
    "softmax": "Softmax",
    "log softmax": "LogSoftmax",
    "batch normalization": "FusedBatchNormV2 FusedBatchNormV3",
    "cross entropies": "SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits",
    # Operations that return the same numbers: as they are, or in another dtype, shape or place.
    "casts": "Cast",
    "casts of bits": "Bitcast",
    "identities": "EnsureShape Identity Snapshot",
    "identities of lists": "IdentityN",
    "identities without a gradient": "PreventGradient StopGradient",
    "identities that check": "CheckNumerics",
    "reshapes": "ExpandDims Reshape Squeeze",
    "views": "Slice StridedSlice Transpose",
    "moves": (
        "BatchToSpace BatchToSpaceND BroadcastTo Concat ConcatV2 DepthToSpace Diag DiagPart Gather "
        "GatherNd GatherV2 MatrixBandPart MatrixDiag MatrixDiagPart MatrixDiagPartV2 "
        "MatrixDiagPartV3 MatrixDiagV2 MatrixDiagV3 MatrixSetDiag MatrixSetDiagV2 MatrixSetDiagV3 "
        "MirrorPad Pack Pad PadV2 ResizeNearestNeighbor Reverse ReverseSequence "
        "ReverseV2 Roll SpaceToBatch SpaceToBatchND SpaceToDepth Split SplitV Tile Unpack"
    ),
    "moves by index": "DynamicPartition DynamicStitch ScatterNd",
    # What regions leave alone.
    "other moves": (
        "SparseToDense TensorScatterUpdate RaggedTensorToTensor SparseConcat SparseReorder "
        "SparseSlice SparseFillEmptyRows ExtractImagePatches ExtractVolumePatches StatelessShuffle"
    ),
    "other arithmetic": (
        "SegmentMax SegmentMin UnsortedSegmentMax UnsortedSegmentMin TensorScatterMax "
        "TensorScatterMin MulNoNan Dilation2D SparseReduceMax SparseDenseCwiseAdd "
        "SparseDenseCwiseMul SparseTensorDenseAdd"
    ),
    "interpolations": "ResizeBilinear CropAndResize",
    # Operations that only test numbers, or make new ones.
    "shapes": "Rank Shape ShapeN Size",
    "tests": "ArgMax ArgMin IsFinite IsInf IsNan Where",
    "orders": "Sign TopK TopKV2",
    "fills": "Fill OneHot OnesLike ZerosLike",
    "empty tensors": "Empty EmptyTensorList TensorListReserve",
    "no numbers": "Assert BroadcastGradientArgs NoOp TensorListElementShape",
    # The beginning and the end of a graph, and its variables.
    "arguments": "Placeholder PlaceholderWithDefault _Arg",
    "data": "IteratorGetNext",
    "constants": "Const",
    "results": "_Retval",
    "variables": "VarHandleOp",
    "reads of variables": variable_ops.READS,
    "looks at variables": variable_ops.LOOKS,
    "writes of variables": "AssignVariableOp",
    "files": "SaveV2",
    # Calls, conditions, loops; loops that grappler has lowered consist of frames.
    "calls": "PartitionedCall StatefulPartitionedCall",
    "conditions": "If StatelessIf Case StatelessCase",
    "loops": "While StatelessWhile",
    "entries of frames": "Enter RefEnter",
    "exits of frames": "Exit RefExit",
    "frames": "LoopCond Merge NextIteration Switch",
    "lists of a loop": (
        "TensorListConcat TensorListConcatLists TensorListConcatV2 TensorListFromTensor "
        "TensorListGather TensorListGetItem TensorListPopBack TensorListPushBack "
        "TensorListPushBackBatch TensorListScatter TensorListScatterIntoExistingList "
        "TensorListScatterV2 TensorListSetItem TensorListSplit TensorListStack"
    ),
    "recurrent cells": (
        "BlockLSTM BlockLSTMV2 GRUBlockCell LSTMBlockCell CudnnRNN CudnnRNNV2 CudnnRNNV3"
    ),
    # The backward pass.
    "gradients": (
        "AvgPool3DGrad AvgPoolGrad EluGrad FusedBatchNormGradV2 FusedBatchNormGradV3 "
        "LeakyReluGrad MaxPool3DGrad MaxPool3DGradGrad MaxPoolGrad MaxPoolGradGrad "
        "MaxPoolGradGradV2 MaxPoolGradV2 MirrorPadGrad Relu6Grad ReluGrad "
        "ResizeNearestNeighborGrad SeluGrad SigmoidGrad SoftplusGrad SoftsignGrad "
        "StridedSliceGrad TanhGrad CudnnRNNBackprop CudnnRNNBackpropV2 CudnnRNNBackpropV3 "
        "BlockLSTMGrad BlockLSTMGradV2 GRUBlockCellGrad LSTMBlockCellGrad"
    ),
    "fusions": (
        "_FusedBatchNormEx FusedConv2DBiasActivation FusedSparseConvGpuV2 Mha MhaV2 Tmlp TmlpV2 "
        "TmlpV3 Pmlp FastUnsortedSegmentMax VoxelMax"
    ),
}

BY_KIND: dict[str, tuple[str, ...]] = {kind: tuple(ops.split()) for kind, ops in _TABLE.items()}

# Random numbers in the dtype of an attribute, and whether they are compared with a rate: 16 bits
# hold too few of them.
DRAWS = {
    name: "Uniform" in name
    for name in (
        *("RandomUniform", "StatelessRandomUniform", "StatelessRandomUniformV2"),
        *("RandomStandardNormal", "TruncatedNormal", "StatelessRandomNormal"),
        *("StatelessRandomNormalV2", "StatelessTruncatedNormal", "StatelessTruncatedNormalV2"),
        *("RandomPoissonV2", "StatelessRandomPoisson"),
        *("StatefulRandomBinomial", "StatelessRandomBinomial"),
    )
}

# The kinds whose outputs are the numbers of their inputs, at most rounded.
SAME_NUMBERS = (
    *("casts", "casts of bits", "identities", "identities of lists"),
    *("identities without a gradient", "reshapes", "views", "moves"),
)


def ops(*kinds: str) -> frozenset[str]:
    """Returns the operations of some kinds.

    Args:
        *kinds: str. Keys of `BY_KIND`.

    Raises:
        KeyError: there is no such kind.

    Example:

    >>> from keras_mp.support import op_table
    >>> "Conv2D" in op_table.ops("matrix products", "convolutions")
    True
    """
    return frozenset(op for kind in kinds for op in BY_KIND[kind])


def gradients_of(op: str) -> tuple[str, ...]:
    """Returns the backward operations that compute the gradient of an operation.

    Args:
        op: str. The operation.

    Example:

    >>> from keras_mp.support import op_table
    >>> op_table.gradients_of("Conv2D")
    ('Conv2DBackpropInput', 'Conv2DBackpropFilter')
    """
    return _GRADIENTS.get(op) or tuple({f"{op}Grad"} & _GRAD)


# What an operation takes in a layer of 16 bits (`kernels/door.py`). Kinds that are in neither of
# these tables stay in 16 bits unless a face among their inputs counts.
LOW = ops(
    *("matrix products", "matrix products into another dtype", "convolutions"),
    *("padded convolutions", "transposed convolutions", "recurrent cells", "gradients"),
    *("transposed convolutions to the shape of a tensor", "gradients of kernels"),
    *("gradients of biases", "fusions", "variables", "arguments", "data"),
    *("looks at variables", "writes of variables", "files", "results", "calls", "conditions"),
    *("loops", "entries of frames", "exits of frames", "frames", "lists of a loop", "constants"),
    *("identities of lists", "shapes", "fills", "empty tensors", "no numbers", "casts of bits"),
    "sparse matrix products",
) - {"Fill", "OneHot"}
PRODUCTS = ops(
    *("matrix products", "convolutions", "transposed convolutions"),
    "transposed convolutions to the shape of a tensor",
)
# Near each other, large and small: sums, squares, quotients, logarithms, and all that 16 bits end.
EXACT = ops(
    *("sums over axes", "running sums", "sums of tensors", "norms", "products over axes"),
    *("squared differences", "squares", "powers", "divisions", "divisions without NaN"),
    *("divisions without remainder", "reciprocals", "roots", "exponentials", "logarithms"),
    *("log softmax", "cross entropies", "softplus", "exponential units", "softsign"),
    *("interpolations", "other functions that 16 bits end"),
) | {"AvgPool3D", "Where"}
# `sampled_softmax_loss` moves the lowest float32 number to where it hides a class. Where places are
# the same, `ScatterNd` adds.
MOVES = (
    ops(
        *("identities", "identities without a gradient", "identities that check", "reshapes"),
        *("views", "moves", "moves by index", "other moves"),
    )
    | {"TopK", "TopKV2"}
) - {"ScatterNd"}
READS = frozenset({*ops("reads of variables"), "ResourceGather", "ResourceGatherNd"})

_GRAD = ops("gradients", "gradients of biases")
# The gradients whose names are not the operation's with "Grad" at the end.
_GRADIENTS = {
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
}
