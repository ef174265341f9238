"""How long 16-bit kernels take on CPUs, relative to float32, by kind of CPU.

This module is data only. The kinds are those of `support/cpu.py`. `python -m benchmarks kernels`
measures the machine that it runs on, and prints its block. A kernel is compared with the one for
float32 and casts around it. The last two rows are the forward pass and both gradients of a matrix
product and a convolution, compared with float32 without casts.

Most kinds were measured with TensorFlow 2.21 on an AMD EPYC (family 25, model 17) of two cores,
which were busy: "AVX512" with ONEDNN_MAX_CPU_ISA=AVX512_CORE, "x86 without oneDNN" with
TF_ENABLE_ONEDNN_OPTS=0; the means of two runs. "AVX2" is one run on an AMD EPYC of model 1, two
busy cores, too, with TF_ENABLE_ONEDNN_OPTS=1. "AMX-BF16" is one run on an Intel Xeon with
AVX512-FP16, too, two quiet cores.
"""

MATRIX_PRODUCT, CONVOLUTION = "matrix product", "convolution"

# Kinds that were not measured, and the nearest one below: such a CPU has its units, and one more.
NEAREST_BELOW = {
    "AMX-FP16": "AMX-BF16",
    "AVX512-FP16": "AVX512-BF16",
    "AVX-NE-CONVERT": "AVX2",
}

# For each kind float16 and bfloat16.
_TIMES = {
    "AMX-BF16": """
Conv2DBackpropFilter                  172.23    0.83
Conv2DBackpropInput                     1.10    0.68
Conv3D                                  1.09    0.80
Conv3DBackpropFilterV2                127.75    0.94
Conv3DBackpropInputV2                   1.14    0.77
DepthwiseConv2dNative                   0.71    0.71
DepthwiseConv2dNativeBackpropFilter    32.44    0.89
DepthwiseConv2dNativeBackpropInput      5.01    0.81
Tanh                                    0.84    0.93
TanhGrad                                0.73    1.01
Sigmoid                                 1.01    1.29
SigmoidGrad                             0.75    1.02
Erf                                     0.80    0.95
Exp                                     0.85    0.92
Elu                                     2.23    1.21
EluGrad                                 2.22    0.99
Selu                                    2.21    1.47
SeluGrad                                2.12    1.06
LeakyRelu                               2.68    0.90
LeakyReluGrad                           2.21    0.82
Softplus                                1.33    1.16
SoftplusGrad                            0.86    1.24
Softmax                                 0.88    0.80
MaxPool                                 0.69    0.68
AvgPool                                 1.32    0.73
AvgPoolGrad                             1.63    0.71
Einsum                                  0.77    0.68
BatchMatMulV2                           0.88    0.63
FusedBatchNormV3                        1.83    1.05
gelu                                    2.89    3.50
gelu by tanh                            1.24    2.68
silu                                    1.11    1.60
matrix product                          0.82    0.29
convolution                             1.34    0.52
""",
    "AVX512-BF16": """
Conv2DBackpropFilter                    5.00    0.85
Conv2DBackpropInput                     5.54    0.75
Conv3D                                  4.51    0.77
Conv3DBackpropFilterV2                  6.24    0.92
Conv3DBackpropInputV2                   4.89    0.76
DepthwiseConv2dNative                   1.93    0.61
DepthwiseConv2dNativeBackpropFilter     1.01    0.54
DepthwiseConv2dNativeBackpropInput      1.37    0.63
Tanh                                    0.88    1.03
TanhGrad                                0.75    1.15
Sigmoid                                 1.22    1.68
SigmoidGrad                             0.67    1.18
Erf                                     0.86    1.07
Exp                                     0.84    1.05
Elu                                     2.86    1.26
EluGrad                                 2.54    1.06
Selu                                    3.26    1.68
SeluGrad                                3.39    1.12
LeakyRelu                               3.41    0.90
LeakyReluGrad                           3.18    0.77
Softplus                                1.16    1.18
SoftplusGrad                            0.90    1.13
Softmax                                 1.37    0.75
MaxPool                                 3.51    0.59
AvgPool                                 1.14    0.70
AvgPoolGrad                             2.37    0.61
Einsum                                  3.37    0.61
BatchMatMulV2                           2.50    0.59
FusedBatchNormV3                        2.32    0.96
gelu                                    3.35    3.70
gelu by tanh                            1.45    2.40
silu                                    1.76    1.86
matrix product                          1.14    0.52
convolution                             1.15    0.61
""",
    "AVX512": """
Conv2DBackpropFilter                    4.65    1.68
Conv2DBackpropInput                     4.70    1.75
Conv3D                                  4.72    1.54
Conv3DBackpropFilterV2                  6.21    1.69
Conv3DBackpropInputV2                   5.00    1.46
DepthwiseConv2dNative                   2.21    1.26
DepthwiseConv2dNativeBackpropFilter     1.45    1.01
DepthwiseConv2dNativeBackpropInput      2.68    1.19
Tanh                                    0.84    1.05
TanhGrad                                0.72    1.20
Sigmoid                                 1.13    1.70
SigmoidGrad                             0.75    1.19
Erf                                     0.86    1.07
Exp                                     0.88    1.03
Elu                                     3.04    1.30
EluGrad                                 3.16    1.03
Selu                                    2.97    1.90
SeluGrad                                3.74    1.17
LeakyRelu                               4.42    0.95
LeakyReluGrad                           3.19    0.83
Softplus                                1.23    1.18
SoftplusGrad                            0.97    1.42
Softmax                                 1.37    0.83
MaxPool                                 4.01    0.66
AvgPool                                 1.07    0.60
AvgPoolGrad                             2.44    0.68
Einsum                                  2.89    1.37
BatchMatMulV2                           2.54    2.15
FusedBatchNormV3                        2.25    0.90
gelu                                    3.60    3.76
gelu by tanh                            1.51    2.61
silu                                    1.66    1.91
matrix product                          1.15    2.54
convolution                             1.14    1.58
""",
    "x86 without oneDNN": """
Conv2DBackpropFilter                    2.50    6.18
Conv2DBackpropInput                     4.26    8.89
Conv3D                                  3.98    9.88
Conv3DBackpropFilterV2                  2.15    4.04
Conv3DBackpropInputV2                   2.88    5.79
DepthwiseConv2dNative                   1.21    2.10
DepthwiseConv2dNativeBackpropFilter     0.93    1.65
DepthwiseConv2dNativeBackpropInput      1.36    2.22
Tanh                                    0.85    1.01
TanhGrad                                0.70    0.91
Sigmoid                                 1.12    1.61
SigmoidGrad                             0.76    1.18
Erf                                     0.80    0.98
Exp                                     0.86    1.05
Elu                                     2.96    1.26
EluGrad                                 3.06    1.04
Selu                                    2.98    1.89
SeluGrad                                3.18    1.11
LeakyRelu                               4.01    0.91
LeakyReluGrad                           3.48    0.78
Softplus                                1.24    1.15
SoftplusGrad                            0.93    1.38
Softmax                                 0.98    1.41
MaxPool                                 1.02    1.10
AvgPool                                 0.98    1.06
AvgPoolGrad                             2.33    1.94
Einsum                                  2.65    6.29
BatchMatMulV2                           0.98    1.00
FusedBatchNormV3                        0.67    0.70
gelu                                    3.28    3.12
gelu by tanh                            1.24    2.81
silu                                    2.41    2.81
matrix product                          1.14    1.15
convolution                             0.96    0.98
""",
    "AVX2": """
Conv2DBackpropFilter                    2.43    6.95
Conv2DBackpropInput                     3.10    9.07
Conv3D                                  3.38    9.43
Conv3DBackpropFilterV2                  3.67    7.34
Conv3DBackpropInputV2                   3.38    8.62
DepthwiseConv2dNative                   1.56    2.13
DepthwiseConv2dNativeBackpropFilter     1.10    1.44
DepthwiseConv2dNativeBackpropInput      1.90    2.55
Tanh                                    0.78    0.90
TanhGrad                                0.71    0.86
Sigmoid                                 0.93    1.14
SigmoidGrad                             0.69    0.85
Erf                                     0.82    0.91
Exp                                     0.84    0.92
Elu                                     1.92    1.17
EluGrad                                 2.27    0.82
Selu                                    1.86    1.33
SeluGrad                                1.98    0.85
LeakyRelu                               1.99    0.92
LeakyReluGrad                           1.76    0.76
Softplus                                1.35    1.19
SoftplusGrad                            0.87    1.16
Softmax                                 1.01    1.30
MaxPool                                 2.22    2.27
AvgPool                                 0.93    0.94
AvgPoolGrad                             1.98    1.71
Einsum                                  2.17    6.03
BatchMatMulV2                           2.12    2.00
FusedBatchNormV3                        2.06    2.08
gelu                                    2.38    2.68
gelu by tanh                            1.29    1.91
silu                                    1.39    2.10
matrix product                          1.00    0.81
convolution                             1.21    1.27
""",
}


def _by_kind() -> dict[str, dict[str, dict[str, float]]]:
    found: dict[str, dict[str, dict[str, float]]] = {kind: {} for kind in _TIMES}
    for kind, block in _TIMES.items():
        for line in block.strip().splitlines():
            float16, bfloat16 = map(float, line[36:].split())
            found[kind][line[:36].strip()] = {"float16": float16, "bfloat16": bfloat16}
    return found


BY_KIND = _by_kind()
