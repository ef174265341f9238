"""Tools that measure the effects of 16 bits on the numbers of a training run.

Each tool is a module of its own. What is gathered on the device stays there until it is read.
"""

from keras_mp.numerics import figures
from keras_mp.numerics.advice import Advice
from keras_mp.numerics.advise import advise
from keras_mp.numerics.audit import Audit, audit
from keras_mp.numerics.census import Census, census
from keras_mp.numerics.compare import compare, compare_records, record
from keras_mp.numerics.compare_function import compare_function
from keras_mp.numerics.comparison import Comparison, Finding
from keras_mp.numerics.exponent_monitor import ExponentMonitor
from keras_mp.numerics.exponents import Fate, Histogram, Window
from keras_mp.numerics.first_bad_operation import FirstBadOperation
from keras_mp.numerics.hazards.traced_step import Hazard
from keras_mp.numerics.histograms import ExponentHistograms
from keras_mp.numerics.lost import Lost, WhatIf
from keras_mp.numerics.not_finite import NotFiniteError
from keras_mp.numerics.records import Record
from keras_mp.numerics.report_rows import Row, Statistics
from keras_mp.numerics.reports import Report
from keras_mp.numerics.step_times import StepTimes, step_times
from keras_mp.numerics.tune import tune
from keras_mp.numerics.tuned import Tuned
from keras_mp.numerics.what_if import what_if

__all__ = [
    "Advice",
    "Audit",
    "Census",
    "Comparison",
    "ExponentHistograms",
    "ExponentMonitor",
    "Fate",
    "Finding",
    "FirstBadOperation",
    "Hazard",
    "Histogram",
    "Lost",
    "NotFiniteError",
    "Record",
    "Report",
    "Row",
    "Statistics",
    "StepTimes",
    "Tuned",
    "WhatIf",
    "Window",
    "advise",
    "audit",
    "census",
    "compare",
    "compare_function",
    "compare_records",
    "figures",
    "record",
    "step_times",
    "tune",
    "what_if",
]
