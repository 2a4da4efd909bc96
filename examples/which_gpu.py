"""Which GPU trains a model for the least money? The best plan of eight of each, at a price of yours."""

import memplan
from memplan.search import searched

PRICES = {"a100-80-sxm": 1.5, "h100-sxm": 2.5, "h200": 3.0, "b200": 4.5}
"""What a GPU-hour costs, in your currency."""

print(f"{'GPU':12} {'plan':24} {'days':>5} {'cost':>6}")
for gpu, price in PRICES.items():
    best = searched("qwen3-8b", cluster=f"8x{gpu}", global_batch=256, seq_len=4096, pp=1).best
    cost = memplan.budget(best, tokens=20e9, price_per_gpu_hour=price)
    plan = f"dp={best.plan.dp} tp={best.plan.tp} zero={best.plan.zero} {best.plan.recompute}"
    print(f"{gpu:12} {plan:24} {cost.days:5.1f} {cost.cost:6,.0f}")
