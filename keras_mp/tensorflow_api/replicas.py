"""The threads of replicas, and how replicas meet."""

from keras_mp.tensorflow_api.names import Name

# Starts the thread of a replica.
start_thread = Name("tensorflow.python.distribute.mirrored_run._MirroredReplicaThread.start")
# Whether replicas can reduce without a merge call.
reduces_alone = Name("tf.__internal__.distribute.strategy_supports_no_merge_call")
