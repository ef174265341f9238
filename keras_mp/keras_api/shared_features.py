"""The features that need private names of either Keras, which both Kerases have."""

from keras_mp.tensorflow_api.features import Feature
from keras_mp.tensorflow_api.names import Name


def shared(build_once: Name, flatten_layers: Name, nodes: Name) -> tuple[Feature, Feature, Feature]:
    """Returns the features of building layers, of finding them, and of outputs.

    Args:
        build_once: what builds a layer where it has not been built.
        flatten_layers: the method that yields the layers inside of one.
        nodes: the attribute of functional models with the calls of their layers.
    """
    return (
        Feature(
            "weights of a layer that are made of others",
            "What a layer in 16 bits makes of a weight in `build` may be stored in 16 bits.",
            (build_once,),
        ),
        Feature(
            "layers in attributes of other layers",
            "keras_mp finds those that `layers` of a model lists, and says nothing of others.",
            (flatten_layers,),
        ),
        Feature(
            "the layers that make a model's outputs",
            "Outputs in 16 bits are cast to float32 where they leave the model, after they were "
            "rounded.",
            (nodes,),
        ),
    )
