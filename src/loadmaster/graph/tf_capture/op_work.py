"""Op work: flops and bytes of a TensorFlow op, from its type and the shapes of its tensors.

A multiplication with an addition is 2 flops, as tf.profiler counts. An op type that is in no table is
costed by the bytes it reads and writes; the capture counts and names such ops.
"""

import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf


def _names(text: str) -> list[str]:
    return text.split()


VIEWS = frozenset(
    _names(
        """
    Identity IdentityN Reshape ExpandDims Squeeze StopGradient PreventGradient Snapshot
    ReadVariableOp Const Placeholder Shape ShapeN Rank Size NoOp VarHandleOp EnsureShape
    CheckNumerics PlaceholderWithDefault VariableShape
    """
    )
)  # nothing is computed, and nothing moved
_MOVES = frozenset(
    _names(
        """
    Cast Transpose Concat ConcatV2 Split SplitV Slice StridedSlice StridedSliceGrad Pack Unpack Pad
    PadV2 MirrorPad Tile BroadcastTo Gather GatherV2 GatherNd ScatterNd Fill ZerosLike OnesLike
    Range Where Select SelectV2 OneHot Unique ReverseV2 ReverseSequence InvertPermutation
    ConjugateTranspose AssignVariableOp ResourceGather DynamicStitch DynamicPartition
    BroadcastGradientArgs BroadcastArgs Bitcast LinSpace TensorListReserve TensorListStack
    TensorListFromTensor TensorListGetItem TensorListSetItem TensorListPushBack TensorListPopBack
    TensorListLength TensorListElementShape TensorListConcatV2 EmptyTensorList ResizeNearestNeighbor
    ResizeNearestNeighborGrad SpaceToBatchND BatchToSpaceND SpaceToDepth DepthToSpace
    UnsortedSegmentSum SegmentSum ResourceScatterAdd ResourceScatterSub ResourceScatterUpdate
    TensorScatterUpdate TensorScatterAdd MatrixBandPart Diag DiagPart MatrixDiagV3 MatrixSetDiagV3
    MatrixDiagPartV3 Roll EagerConst _EagerConst TopK TopKV2 Assert Print PrintV2 StringFormat Empty
    Bucketize LookupTableFindV2 Copy DeepCopy Concat ConcatOffset ParallelConcat
    """
    )
)
_EACH = {  # flops for each element of the result
    **dict.fromkeys(
        _names(
            """
    Add AddV2 Sub Mul Div RealDiv DivNoNan FloorDiv FloorMod Mod TruncateDiv Neg Abs Sign Maximum
    Minimum Square SquaredDifference Relu Relu6 ReluGrad Relu6Grad LeakyRelu LeakyReluGrad BiasAdd
    BiasAddV1 Equal NotEqual Less LessEqual Greater GreaterEqual LogicalAnd LogicalOr LogicalNot
    Round Floor Ceil Rint IsNan IsInf IsFinite AssignAddVariableOp AssignSubVariableOp MulNoNan
    ClipByValue BitwiseAnd BitwiseOr BitwiseXor LeftShift RightShift Invert Reciprocal Inv Real Imag
    Conj PopulationCount
    """
        ),
        1,
    ),
    **dict.fromkeys(
        _names(
            """
    Sqrt Rsqrt Exp Log Expm1 Log1p Xdivy Xlogy
    """
        ),
        2,
    ),
    **dict.fromkeys(
        _names(
            """
    Tanh TanhGrad Sigmoid SigmoidGrad SqrtGrad RsqrtGrad Erf Erfc Pow Elu EluGrad Selu SeluGrad
    Softplus SoftplusGrad _MklSwish Softsign SoftsignGrad Sin Cos Tan Asin Acos Atan Sinh Cosh Digamma Lgamma
    ReciprocalGrad InvGrad Erfinv Ndtri _UnaryOpsComposition
    """
        ),
        4,
    ),
    **dict.fromkeys(
        _names(
            """
    Softmax LogSoftmax SparseSoftmaxCrossEntropyWithLogits
    """
        ),
        5,
    ),
    "SoftmaxCrossEntropyWithLogits": 5,
    **dict.fromkeys(
        _names(
            """
    StatelessRandomUniform StatelessRandomUniformV2 StatelessRandomNormal StatelessRandomNormalV2
    StatelessTruncatedNormalV2 StatelessRandomUniformIntV2 RandomUniform RandomStandardNormal
    TruncatedNormal RandomUniformInt StatelessRandomGetKeyCounter StatelessRandomGetAlg
    StatefulStandardNormalV2 StatefulUniform RngReadAndSkip
    """
        ),
        8,
    ),
    "LRNGrad": 10,
    "LRN": 10,
}
_READ = {  # flops for each element of the first input
    **dict.fromkeys(
        _names(
            """
    Sum Mean Prod Max Min All Any ArgMax ArgMin BiasAddGrad Cumsum Cumprod L2Loss
    """
        ),
        1,
    ),
    "EuclideanNorm": 2,
    "FusedBatchNormV3": 8,
    "FusedBatchNormGradV3": 14,
    "ResizeBilinear": 8,
    "ResizeBilinearGrad": 8,
}
_UPDATES = {  # flops for each element of the weight
    "ResourceApplyGradientDescent": 2,
    "ResourceApplyMomentum": 4,
    "ResourceApplyKerasMomentum": 4,
    "ResourceApplyAdam": 12,
    "ResourceApplyAdamWithAmsgrad": 14,
    "ResourceApplyAdagradV2": 6,
    "ResourceApplyRMSProp": 10,
    "ResourceApplyFtrlV2": 12,
}


def elements(tensor: Any) -> int:
    """Of a tensor; a free axis counts as one."""
    shape = tensor.shape
    if shape.rank is None:
        return 1
    return math.prod(1 if size is None else int(size) for size in shape.as_list())


def tensor_bytes(tensor: Any) -> int:
    """Of a tensor; 0 of a handle or a list of tensors."""
    if tensor.dtype in (tf.resource, tf.variant):
        return 0
    return elements(tensor) * (16 if tensor.dtype == tf.string else int(tensor.dtype.size))


def has_free_shape(tensor: Any) -> bool:
    """Whether its size is not known."""
    held = tensor.dtype in (tf.resource, tf.variant)
    return not held and (tensor.shape.rank is None or None in tensor.shape.as_list())


def is_known(kind: str) -> bool:
    """Whether an op type is in a table."""
    return (
        kind in VIEWS
        or kind in _MOVES
        or kind in _EACH
        or kind in _READ
        or kind in _UPDATES
        or kind in _SPECIAL
    )


def op_flops(op: Any) -> float:
    """Floating-point operations of an op."""
    kind = op.type
    if kind in _SPECIAL:
        return float(_SPECIAL[kind](op))
    if kind in _EACH:
        written = op.outputs[0] if op.outputs else op.inputs[1]
        read = (
            op.inputs[0]
            if kind in ("SparseSoftmaxCrossEntropyWithLogits", "SoftmaxCrossEntropyWithLogits")
            else written
        )
        return float(_EACH[kind] * elements(read))
    if kind in _READ:
        return float(_READ[kind] * elements(op.inputs[0]))
    if kind in _UPDATES:
        return float(_UPDATES[kind] * max(elements(tensor) for tensor in op.inputs))
    return 0.0


def op_bytes(op: Any) -> int:
    """Bytes that an op reads and writes; none for a view."""
    if op.type in VIEWS:
        return 0
    if op.type in ("GatherV2", "Gather"):  # reads the rows it gives
        return 2 * sum(map(tensor_bytes, op.outputs)) + tensor_bytes(op.inputs[1])
    if op.type == "ResourceGather":
        return 2 * sum(map(tensor_bytes, op.outputs)) + tensor_bytes(op.inputs[1])
    return sum(map(tensor_bytes, {tensor.ref(): tensor for tensor in op.inputs}.values())) + sum(
        map(tensor_bytes, op.outputs)
    )


def _matmul(op: Any) -> int:
    """2 x rows x columns x inner."""
    left, right = _sizes(op.inputs[0]), _sizes(op.inputs[1])
    first = _attr(op, "adj_x") or _attr(op, "transpose_a")
    second = _attr(op, "adj_y") or _attr(op, "transpose_b")
    inner = (left[-2 if first else -1] if len(left) > 1 else None) or (
        right[-1 if second else -2] if len(right) > 1 else None
    )
    return 2 * elements(op.outputs[0]) * (inner or 1)


def _sizes(tensor: Any) -> list[int | None]:
    """Its shape; nothing where not even the number of axes is known."""
    return [] if tensor.shape.rank is None else list(tensor.shape.as_list())


def _attr(op: Any, name: str) -> Any:
    return op.get_attr(name) if name in op.node_def.attr else False


def _einsum(op: Any) -> int:
    """2 x the sizes of all letters."""
    left, _, _ = op.get_attr("equation").decode().partition("->")
    sizes: dict[str, int] = {}
    for letters, tensor in zip(left.split(","), op.inputs, strict=True):
        named = letters.replace("...", "")
        for letter, size in zip(named[::-1], _sizes(tensor)[::-1], strict=False):
            sizes[letter] = max(sizes.get(letter, 1), size or 1)
    return (2 if len(op.inputs) > 1 else 1) * math.prod(sizes.values())


def _convolution(op: Any) -> int:
    """2 x results x the filter's reach: all its elements but the output channels."""
    kernel = _sizes(op.inputs[1])
    return 2 * elements(op.outputs[0]) * math.prod(size or 1 for size in kernel[:-1])


def _input_gradient(op: Any) -> int:
    kernel = _sizes(op.inputs[1])
    return 2 * elements(op.inputs[2]) * math.prod(size or 1 for size in kernel[:-1])


def _filter_gradient(op: Any) -> int:
    kernel = _sizes(op.outputs[0])
    return 2 * elements(op.inputs[2]) * math.prod(size or 1 for size in kernel[:-1])


def _depthwise(op: Any) -> int:
    """Each output channel reads one input channel."""
    height, width = (*_sizes(op.inputs[1])[:2], 1, 1)[:2]
    return 2 * elements(op.outputs[0]) * (height or 1) * (width or 1)


def _depthwise_input_gradient(op: Any) -> int:
    height, width = (*_sizes(op.inputs[1])[:2], 1, 1)[:2]
    return 2 * elements(op.inputs[2]) * (height or 1) * (width or 1)


def _depthwise_filter_gradient(op: Any) -> int:
    height, width = (*_sizes(op.outputs[0])[:2], 1, 1)[:2]
    return 2 * elements(op.inputs[2]) * (height or 1) * (width or 1)


def _fused_epilogue(op: Any, work: int) -> int:
    return work + elements(op.outputs[0]) * len(op.get_attr("fused_ops"))


def _pooling(op: Any) -> int:
    return elements(op.outputs[0]) * math.prod(op.get_attr("ksize"))


def _pooling_gradient(op: Any) -> int:
    return elements(op.outputs[0]) * math.prod(op.get_attr("ksize"))


def _add_n(op: Any) -> int:
    return elements(op.outputs[0]) * (len(op.inputs) - 1)


_SPECIAL: dict[str, Callable[[Any], int]] = {
    "MatMul": _matmul,
    "BatchMatMul": _matmul,
    "BatchMatMulV2": _matmul,
    "BatchMatMulV3": _matmul,
    "_FusedMatMul": lambda op: _fused_epilogue(op, _matmul(op)),
    "_FusedBatchMatMulV2": lambda op: _fused_epilogue(op, _matmul(op)),
    "Einsum": _einsum,
    "Conv2D": _convolution,
    "Conv3D": _convolution,
    "_FusedConv2D": lambda op: _fused_epilogue(op, _convolution(op)),
    "_MklNativeFusedConv2D": lambda op: _fused_epilogue(op, _convolution(op)),
    "_FusedConv3D": lambda op: _fused_epilogue(op, _convolution(op)),
    "Conv2DBackpropInput": _input_gradient,
    "Conv3DBackpropInputV2": _input_gradient,
    "Conv2DBackpropFilter": _filter_gradient,
    "Conv3DBackpropFilterV2": _filter_gradient,
    "DepthwiseConv2dNative": _depthwise,
    "_FusedDepthwiseConv2dNative": lambda op: _fused_epilogue(op, _depthwise(op)),
    "DepthwiseConv2dNativeBackpropInput": _depthwise_input_gradient,
    "DepthwiseConv2dNativeBackpropFilter": _depthwise_filter_gradient,
    "MaxPool": _pooling,
    "AvgPool": _pooling,
    "MaxPool3D": _pooling,
    "AvgPool3D": _pooling,
    "MaxPoolGrad": _pooling_gradient,
    "AvgPoolGrad": _pooling_gradient,
    "MaxPool3DGrad": _pooling_gradient,
    "AvgPool3DGrad": _pooling_gradient,
    "AddN": _add_n,
}
