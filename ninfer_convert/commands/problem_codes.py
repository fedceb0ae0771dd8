"""Exit codes of plans with problems."""

from ninfer_convert.plan import ConversionPlan
from ninfer_convert.problems import Problem
from ninfer_format.errors import SourceError, StorageError, UsageError

# Problems of the output are usage (2) or storage (3), and so are those of an option (2); any of the source gives 1.
_OUTPUT_PROBLEMS = {
    "output-exists": UsageError.exit_code,
    "output-is-link": UsageError.exit_code,
    "output-is-folder": UsageError.exit_code,
    "output-not-a-file": UsageError.exit_code,
    "output-in-source": UsageError.exit_code,
    "no-output-folder": UsageError.exit_code,
    "read-only-output": StorageError.exit_code,
    "disk-space": StorageError.exit_code,
}


def problem_code(planned: ConversionPlan) -> int:
    """The lowest code of all problems; 0 without any."""

    def code_of(problem: Problem) -> int:
        option = problem.where.startswith("--")
        return _OUTPUT_PROBLEMS.get(problem.code, UsageError.exit_code if option else SourceError.exit_code)

    return min(map(code_of, planned.problems), default=0)
