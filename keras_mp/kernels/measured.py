"""How many times as long as in float32 16-bit kernels take on CPUs, by kind. All of it is data.

The kinds are those of `support/cpu.py`. `python -m benchmarks kernels` measures the machine that it
runs on, and prints its columns. A kernel is compared with the one for float32 and casts around it.
The first two rows are the forward pass and both gradients of a matrix product and a convolution,
compared with float32 without casts.

The first three kinds were measured with TensorFlow 2.21 on an AMD EPYC (family 25, model 17) of two
cores, which were busy: "AVX512" with ONEDNN_MAX_CPU_ISA=AVX512_CORE, "x86 without oneDNN" with
TF_ENABLE_ONEDNN_OPTS=0; the means of two runs. "AVX2" is one run on an AMD EPYC of model 1, two
busy cores, too, with TF_ENABLE_ONEDNN_OPTS=1.
"""

MATRIX_PRODUCT, CONVOLUTION = "matrix product", "convolution"
_KINDS = ("AVX512-BF16", "AVX512", "x86 without oneDNN", "AVX2")

# For each kind bfloat16 and float16.
_TIMES = """
matrix product                          0.52    1.14    2.54    1.15    1.15    1.14    0.81    1.00
convolution                             0.61    1.15    1.58    1.14    0.98    0.96    1.27    1.21
Conv2DBackpropFilter                    0.85    5.00    1.68    4.65    6.18    2.50    6.95    2.43
Conv2DBackpropInput                     0.75    5.54    1.75    4.70    8.89    4.26    9.07    3.10
Conv3D                                  0.77    4.51    1.54    4.72    9.88    3.98    9.43    3.38
Conv3DBackpropFilterV2                  0.92    6.24    1.69    6.21    4.04    2.15    7.34    3.67
Conv3DBackpropInputV2                   0.76    4.89    1.46    5.00    5.79    2.88    8.62    3.38
DepthwiseConv2dNative                   0.61    1.93    1.26    2.21    2.10    1.21    2.13    1.56
DepthwiseConv2dNativeBackpropFilter     0.54    1.01    1.01    1.45    1.65    0.93    1.44    1.10
DepthwiseConv2dNativeBackpropInput      0.63    1.37    1.19    2.68    2.22    1.36    2.55    1.90
Tanh                                    1.03    0.88    1.05    0.84    1.01    0.85    0.90    0.78
TanhGrad                                1.15    0.75    1.20    0.72    0.91    0.70    0.86    0.71
Sigmoid                                 1.68    1.22    1.70    1.13    1.61    1.12    1.14    0.93
SigmoidGrad                             1.18    0.67    1.19    0.75    1.18    0.76    0.85    0.69
Erf                                     1.07    0.86    1.07    0.86    0.98    0.80    0.91    0.82
Exp                                     1.05    0.84    1.03    0.88    1.05    0.86    0.92    0.84
Elu                                     1.26    2.86    1.30    3.04    1.26    2.96    1.17    1.92
EluGrad                                 1.06    2.54    1.03    3.16    1.04    3.06    0.82    2.27
Selu                                    1.68    3.26    1.90    2.97    1.89    2.98    1.33    1.86
SeluGrad                                1.12    3.39    1.17    3.74    1.11    3.18    0.85    1.98
LeakyRelu                               0.90    3.41    0.95    4.42    0.91    4.01    0.92    1.99
LeakyReluGrad                           0.77    3.18    0.83    3.19    0.78    3.48    0.76    1.76
Softplus                                1.18    1.16    1.18    1.23    1.15    1.24    1.19    1.35
SoftplusGrad                            1.13    0.90    1.42    0.97    1.38    0.93    1.16    0.87
Softmax                                 0.75    1.37    0.83    1.37    1.41    0.98    1.30    1.01
MaxPool                                 0.59    3.51    0.66    4.01    1.10    1.02    2.27    2.22
AvgPool                                 0.70    1.14    0.60    1.07    1.06    0.98    0.94    0.93
AvgPoolGrad                             0.61    2.37    0.68    2.44    1.94    2.33    1.71    1.98
Einsum                                  0.61    3.37    1.37    2.89    6.29    2.65    6.03    2.17
BatchMatMulV2                           0.59    2.50    2.15    2.54    1.00    0.98    2.00    2.12
FusedBatchNormV3                        0.96    2.32    0.90    2.25    0.70    0.67    2.08    2.06
gelu                                    3.70    3.35    3.76    3.60    3.12    3.28    2.68    2.38
gelu by tanh                            2.40    1.45    2.61    1.51    2.81    1.24    1.91    1.29
silu                                    1.86    1.76    1.91    1.66    2.81    2.41    2.10    1.39
"""


def _by_kind() -> dict[str, dict[str, dict[str, float]]]:
    found: dict[str, dict[str, dict[str, float]]] = {kind: {} for kind in _KINDS}
    for line in _TIMES.strip().splitlines():
        op, numbers = line[:36].strip(), list(map(float, line[36:].split()))
        for i, kind in enumerate(_KINDS):
            found[kind][op] = {"bfloat16": numbers[2 * i], "float16": numbers[2 * i + 1]}
    return found


BY_KIND = _by_kind()
