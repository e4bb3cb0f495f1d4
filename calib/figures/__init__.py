"""Numbers in, Plotly figure out; the app, `calib curves` and the report draw with the same functions.

Every figure names the unit of each axis, shows exact values on hover, says what is estimated or simulated, and has a
transparent ground. A dataset has one style everywhere (`dataset_colours` of all names); all questions together are
drawn in the colour of the text. The look is in `palette`, what several figures share in `drawing`; the figures are in
`knobs` (threshold, budget, mix), `speed` (latency, front), `answers` (risk, reliability, who changes) and `studies`;
`files` draws and writes all figures of a policy. Leaves the numbers to `calib.curves`.
"""

from calib.figures.answers import confidences, differences, flip_bars, reliability, risk_coverage, thinking_helps
from calib.figures.files import FORMATS, policy_figures, write_curves
from calib.figures.knobs import accuracy_by_budget, accuracy_by_mix, threshold_curves
from calib.figures.palette import THEMES, Style, Styles, Theme, dataset_colours
from calib.figures.speed import frontier, latency_distribution
from calib.figures.studies import study_history, study_importance, study_parallel

__all__ = [
    "FORMATS",
    "THEMES",
    "Style",
    "Styles",
    "Theme",
    "accuracy_by_budget",
    "accuracy_by_mix",
    "confidences",
    "dataset_colours",
    "differences",
    "flip_bars",
    "frontier",
    "latency_distribution",
    "policy_figures",
    "reliability",
    "risk_coverage",
    "study_history",
    "study_importance",
    "study_parallel",
    "thinking_helps",
    "threshold_curves",
    "write_curves",
]
