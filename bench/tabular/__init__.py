"""Tables: AUC or R² of the twin, of three processes and of ``ppvfl`` at ε = 1, 3, 8, beside scikit-learn without
privacy.

    python -m bench.tabular            # all three tables; some minutes
    python -m bench.tabular --only regression --epsilon 3 --backends twin
    python -m bench.tabular --only adult --data-root DIR     # the public file of UCI

Twins are a mean over seeds of the noise, real runs are made once, all on the same split and the same scaled columns.
Public rows (for scaling) take no part in training or test. Parameters are the defaults, from sizes and ε alone.
"""

from bench.tabular.measure import main, measure, non_private
from bench.tabular.tables import FILES, TABLES, Task, mixed_tables, table_from_file

__all__ = ["FILES", "TABLES", "Task", "main", "measure", "mixed_tables", "non_private", "table_from_file"]
