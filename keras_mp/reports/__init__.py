"""Reports of skipped steps: what was not finite, and warnings of many.

The core of a step does not import them: `extensions` lets each `SkippedSteps` have a `SkipReport`.
"""
