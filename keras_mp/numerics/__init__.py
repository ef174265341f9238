"""Four tools for four questions.

`check`: is this model safe and right in 16 bits? `watch`: what happens while it trains? `tune`:
which policy for each layer, and which loss scale? `profile`: why is it not faster?
"""

from keras_mp.numerics.check import Check, check
from keras_mp.numerics.comparison.compare import record
from keras_mp.numerics.comparison.records import Record
from keras_mp.numerics.exponents.reports import Report
from keras_mp.numerics.operations.not_finite import NotFiniteError
from keras_mp.numerics.profile import Profile, profile
from keras_mp.numerics.results import Finding
from keras_mp.numerics.tune import tune
from keras_mp.numerics.tuned import Tuned
from keras_mp.numerics.watch import watch

__all__ = [
    "Check",
    "Finding",
    "NotFiniteError",
    "Profile",
    "Record",
    "Report",
    "Tuned",
    "check",
    "profile",
    "record",
    "tune",
    "watch",
]
