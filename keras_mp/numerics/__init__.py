"""Four tools for four questions.

`check`: is this model safe and right in 16 bits? `watch`: what happens while it trains? `tune`:
which policy for each layer, and which loss scale? `profile`: why is it not faster?
"""

from keras_mp.numerics.check import Check, check
from keras_mp.numerics.first_bad import NotFiniteError
from keras_mp.numerics.profile import Profile, profile
from keras_mp.numerics.report import Report
from keras_mp.numerics.results import Finding
from keras_mp.numerics.tune import Tuned, tune
from keras_mp.numerics.watch import watch

__all__ = [
    "Check",
    "Finding",
    "NotFiniteError",
    "Profile",
    "Report",
    "Tuned",
    "check",
    "profile",
    "tune",
    "watch",
]
