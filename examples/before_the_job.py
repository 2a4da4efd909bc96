"""A check before a job is sent off: ends with 1 and advice if the plan does not fit for sure."""

import sys

import memplan

PLAN = {"cluster": "8xa100-40-sxm", "zero": 3, "micro_batch": 2, "global_batch": 64, "seq_len": 4096}

try:
    e = memplan.estimate("llama-3-8b", **PLAN)
except memplan.PlanRefused as refusal:  # PyTorch cannot run it: the text has the reason and a way out
    sys.exit(str(refusal))
print(e.verdict)
if e.verdict != "fits":
    print(memplan.advise(e))
    sys.exit(1)
