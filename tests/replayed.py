"""How many of the ranks that were run without a GPU are equal to today's predictions.

`tests/test_replay_nogpu.py` fails if one is not; texts and the documentation take their figures from here.
"""

from typing import Final

EXACT: Final = (0.0, 0.0, 0.0)
EXPECTED: Final = {
    "a100-single": (45, (45, 45, 45), EXACT),
    "h100-single": (45, (45, 45, 45), EXACT),
    "b200-single": (45, (45, 45, 45), EXACT),
    "h200-published": (5, (4, 4, 4), (0.0001, 0.0001, 0.002)),
    "h100-single-torch2.11": (41, (41, 41, 41), EXACT),
    "h100-single-torch2.12": (41, (41, 41, 40), (0.0, 0.0, 0.064)),
    "h100-single-torch2.14": (41, (41, 41, 41), EXACT),
    "h100-single-torch2.15": (41, (41, 41, 41), EXACT),
    "h100-nccl-torch2.11": (100, (0, 8, 98), (1e-8, 0.004, 0.05)),  # a byte; zbv's two ranks
    "h100-nccl-torch2.12": (100, (100, 90, 100), (0.0, 0.0023, 0.0)),
    "h100-nccl-torch2.14": (100, (100, 100, 100), EXACT),
    "h100-nccl-torch2.15": (100, (100, 94, 100), (0.0, 0.0015, 0.0)),
    "a100-standin": (57, (57, 57, 55), (0.0, 0.0, 0.0023)),  # zero-bubble: autograd's thread lets go late
    "h100-matrix": (2511, (2423, 2431, 2499), (0.9, 0.0005, 0.056)),  # 0.00002 but for PowerSGD
    "a100-shared": (72, (72, 32, 25), (0.0, 0.018, 0.25)),  # when gloo's threads let go is theirs to say
    "b200-shared": (72, (72, 35, 26), (0.0, 0.0161, 0.224)),
    "h100-shared": (72, (72, 32, 26), (0.0, 0.014, 0.23)),
    "a100-nccl": (100, (100, 100, 100), EXACT),
    "b200-nccl": (100, (100, 99, 100), (0.0, 0.0028, 0.0)),
    "h100-nccl": (100, (100, 99, 100), (0.0, 0.0068, 0.0)),  # zbv: its threads
    "h100-standin": (57, (57, 57, 57), EXACT),
    "b200-standin": (57, (57, 57, 55), (0.0, 0.0, 0.0013)),
    "a100-allocator": (158, (158, 158, 158), EXACT),
    "b200-allocator": (158, (158, 158, 158), EXACT),
    "h100-allocator": (158, (158, 158, 157), (0.0, 0.0, 0.0004)),
    "a100-wild": (24, (24, 24, 24), (0, 0, 0)),
    "h100-wild": (21, (21, 3, 8), (0, 0.00052, 0.0111)),  # with images
    "b200-wild": (31, (31, 31, 30), (0, 0, 0.0021)),
    "h200-wild": (71, (71, 71, 70), (0, 0, 0.0018)),  # other people's modules
    "a100-families": (114, (114, 111, 114), (0, 0.00003, 0)),  # transformers' decoders
    "h100-families": (1062, (1061, 1058, 1062), (0.00012, 0.0096, 0)),  # pipelines too
    "h100-divided": (99, (97, 93, 94), (0.0012, 0.0012, 0.0011)),  # transformers' own ranks of all kinds
    "a100-divided": (95, (94, 89, 90), (0.0036, 0.0036, 0.046)),  # when DTensors' updates are freed
    "a100-fsdp1": (56, (56, 55, 50), (0, 0.0003, 0.015)),  # tied models' setup is a guess; offload
    "h100-fsdp1": (56, (56, 55, 50), (0, 0.0003, 0.015)),
    "h100-adapters": (48, (48, 48, 33), (0.0, 0.0, 0.0057)),  # reserved: DDP, int8
    "h100-chunked-loss": (11, (11, 9, 7), (0.0, 0.0001, 0.0046)),  # torchtitan's
    "h100-compiled": (30, (30, 26, 16), (0.0, 0.00012, 0.0027)),
    "h100-float8": (33, (33, 30, 22), (0.0, 0.00024, 0.0179)),  # an eager one of 4 tensor ranks
    "h100-losses": (11, (11, 11, 11), EXACT),  # Liger's
    "h100-no-sync": (10, (10, 10, 9), (0.0, 0.0, 0.00075)),
    "h100-offloading": (34, (28, 26, 29), (4e-6, 0.00012, 0.0093)),  # TRL's: 8 bytes a token
    "h100-optimizers": (128, (126, 123, 121), (5.5e-5, 0.000133, 0.0022)),  # 64 ranks, with AdamW too
    "h100-deepspeed": (201, (201, 200, 192), (0, 0.0001, 0.0016)),
    "a100-fairscale": (15, (15, 14, 14), (0, 0.0002, 0.0011)),
    "h100-fairscale": (15, (15, 14, 14), (0, 0.0004, 0.0011)),
    "h100-torchtitan": (4, (4, 1, 0), (0.0, 0.0087, 0.0097)),  # mixtures; reserved: see validate/README.md
    "a100-colossalai": (18, (18, 16, 17), (0, 0.0002, 0.002)),
    "h100-colossalai": (18, (18, 16, 17), (0, 0.0001, 0.002)),
    "h100-trainers": (62, (62, 54, 36), (0, 0.0005, 0.0087)),  # FSDP as Accelerate loads it
    "h100-trl": (74, (66, 54, 35), (9.1e-5, 0.00056, 0.0449)),  # as Accelerate loads it; merges of adapters
    "a100-deepspeed": (91, (91, 91, 90), (0, 0, 0.0003)),
    "a100-frontier": (87, (87, 87, 87), EXACT),
    "h100-frontier": (89, (89, 89, 89), EXACT),
    "b200-frontier": (89, (89, 89, 89), EXACT),
}
"""For each file of `data/measurements/nogpu`: ranks; in how many requested, allocated and reserved bytes are
equal; how far off they are at most."""
