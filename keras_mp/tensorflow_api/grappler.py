"""Grappler: its optimizer, its clusters, and its switch for float16 in sessions."""

from keras_mp.tensorflow_api.names import Name

optimize = Name("tensorflow.python.grappler.tf_optimizer.OptimizeGraph")
Cluster = Name("tensorflow.python.grappler.cluster.Cluster")
Device = Name("tensorflow.core.protobuf.device_properties_pb2.NamedDevice")

rewrite_in_sessions = Name(
    "tensorflow.python.training.experimental.mixed_precision_global_state"
    ".set_mixed_precision_graph_rewrite_enabled"
)
is_rewrite_in_sessions = Name("tf.__internal__.train.is_mixed_precision_graph_rewrite_enabled")
